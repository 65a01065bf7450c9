"""Whoever reads weights that arrive in the forward sees those of the last step: `READERS`, another
stream, a second engine, and what a destroyed engine leaves."""

from __future__ import annotations

import copy
import random
import shutil
from pathlib import Path
from typing import Any
from unittest.mock import patch

import deepspeed
import pytest
import torch
from deepspeed import comm as dist
from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_local_fp32_param,
    safe_set_full_fp32_param,
    safe_set_local_fp32_param,
)

from deepspeed_ext.adapter import late_groups, late_weights
from tests.support.late_weights import (
    WithFrozen,
    differs,
    exact_config,
    small_chunks,
    waiting,
)
from tests.support.models import batches, on_device, two_groups
from tests.support.ranks import run_ranks
from tests.support.same import first_difference
from tests.support.zenflow import make_engine, masters_of, train, weights_of

pytestmark = pytest.mark.sampled()


# Each reader looks at an engine between two steps, and returns what it sees.


def look(engine: Any, folder: str) -> Any:
    return weights_of(engine)


def look_at_one(engine: Any, folder: str) -> Any:
    """The last trained one, in a gather that a frozen one begins."""
    *_, name = (name for name, each in engine.module.named_parameters() if each.requires_grad)
    param = engine.module.get_parameter(name)
    both: list[Any] = [engine.module.scale, param]
    with deepspeed.zero.GatheredParameters(both, enabled=hasattr(param, "ds_id")):
        return param.detach().float().cpu().clone()


def change(engine: Any, folder: str) -> Any:
    param = engine.module.up.bias
    enabled = hasattr(param, "ds_id")
    with (
        deepspeed.zero.GatheredParameters([param], modifier_rank=0, enabled=enabled),
        torch.no_grad(),
    ):
        param.add_(0.25)
    return weights_of(engine)


def evaluate(engine: Any, folder: str) -> Any:
    engine.eval()
    with torch.no_grad():
        loss = float(engine(on_device(batches(1, dist.get_rank(), 7)[0])))
    engine.train()
    return loss


def use_the_module(engine: Any, folder: str) -> Any:
    with torch.no_grad():
        return float(engine.module(on_device(batches(1, dist.get_rank(), 8)[0])))


def export(engine: Any, folder: str) -> Any:
    with engine.exporting():
        return weights_of(engine)


def consolidate(engine: Any, folder: str) -> Any:
    if engine.zero_optimization_stage() < 3:
        return None
    state = engine._zero3_consolidated_16bit_state_dict()
    return {name: value.float() for name, value in (state or {}).items()}


def save_and_load(engine: Any, folder: str) -> Any:
    engine.save_checkpoint(folder, tag="kept")
    found = weights_of(engine)
    engine.load_checkpoint(folder, tag="kept")
    return [found, weights_of(engine)]


def load(engine: Any, folder: str) -> Any:
    if Path(folder, "kept").exists():
        engine.load_checkpoint(folder, tag="kept")
    return weights_of(engine)


def read_state(engine: Any, folder: str) -> Any:
    return masters_of(engine)


def write_state(engine: Any, folder: str) -> Any:
    is_local = engine.zero_optimization_stage() == 3
    read, write = (
        (safe_get_local_fp32_param, safe_set_local_fp32_param)
        if is_local
        else (safe_get_full_fp32_param, safe_set_full_fp32_param)
    )
    for param in engine.module.parameters():
        if param.requires_grad:
            write(param, read(param) * 0.5)
    return [masters_of(engine), weights_of(engine)]


def away(engine: Any, folder: str) -> Any:
    engine.offload_states(pin_memory=False)
    engine.reload_states()


def weights_away(engine: Any, folder: str) -> Any:
    engine.offload_states(include={OffloadStateTypeEnum.lp_params}, pin_memory=False)
    engine.reload_states()
    return weights_of(engine)


READERS = [
    look,
    look_at_one,
    change,
    evaluate,
    use_the_module,
    export,
    consolidate,
    save_and_load,
    load,
    read_state,
    write_state,
    away,
    weights_away,
]


def observed(config: dict[str, Any], seed: int, folder: str) -> list[Any]:
    """What readers see in a drawn order, between steps."""
    draw, found = random.Random(seed), []
    shutil.rmtree(f"{folder}/{seed}", ignore_errors=True)
    dist.barrier()
    engine = make_engine(config, model=WithFrozen, groups=two_groups)
    for number in range(8):
        found.append(train(engine, batches(1, dist.get_rank(), 100 + number)))
        for reader in draw.sample(READERS, draw.choice([0, 1, 1, 2])):
            found.append((reader.__name__, reader(engine, f"{folder}/{seed}")))
    found.append(weights_of(engine))
    engine.destroy()
    return found


def unlike(config: dict[str, Any], seeds: list[int], folder: str) -> list[str]:
    with small_chunks():
        return [
            f"seed {seed}: {difference}"
            for seed in seeds
            if (
                difference := first_difference(
                    observed(waiting(config), seed, folder), observed(config, seed, folder)
                )
            )
        ]


DRAWN: tuple[tuple[int, int, str, str, list[int]], ...] = (
    (3, 2, "exact", "cpu", [1, 2, 3]),
    (3, 1, "exact", "sim", [4, 5]),
    (3, 2, "exact", "sim", [6, 7]),
    (2, 1, "exact", "sim", [8, 9]),
    (1, 2, "exact", "sim", [10, 11]),
    (1, 2, "predictive", "sim", [12, 13]),
    (2, 3, "predictive", "cpu", [14]),
)
"""Stage, ranks, rule, device, and seeds, of which the first runs by default."""


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("stage", "ranks", "rule", "device", "seeds"),
    [
        *((*setting, seeds[:1]) for *setting, seeds in DRAWN),
        *(
            pytest.param(*setting, seeds[1:], marks=pytest.mark.full)
            for *setting, seeds in DRAWN
            if len(seeds) > 1
        ),
    ],
)
def test_every_reader_sees_the_weights_of_the_last_step(
    stage: int, ranks: int, rule: str, device: str, seeds: list[int], tmp_path: Path
) -> None:
    config, pool = exact_config(stage, update_rule=rule), f"exact {stage == 3}"
    found = run_ranks(ranks, unlike, config, seeds, str(tmp_path), device=device, pool=pool)
    assert found == [[]] * ranks


def each_reader(config: dict[str, Any], folder: str) -> list[str]:
    """Every reader, directly behind a step whose weights are on their way."""
    found = []
    for mine in (waiting(config), config):
        with small_chunks():
            engine = make_engine(mine, model=WithFrozen, groups=two_groups)
            seen = []
            for number, reader in enumerate(READERS):
                train(engine, batches(1, dist.get_rank(), number))
                seen.append((reader.__name__, reader(engine, f"{folder}/each")))
            engine.destroy()
        found.append(seen)
    return [first_difference(*found)]


@pytest.mark.parametrize(("stage", "rule"), [(2, "exact"), (3, "exact"), (2, "predictive")])
def test_so_does_each_of_them_alone(stage: int, rule: str, tmp_path: Path) -> None:
    config, pool = exact_config(stage, update_rule=rule), f"exact {stage == 3}"
    found = run_ranks(2, each_reader, config, str(tmp_path), device="sim", pool=pool)
    assert found == [[""], [""]]


def without_the_wait(config: dict[str, Any]) -> tuple[str, int]:
    """The difference that this makes, and the number of races."""
    from tests.support.simulated_accelerator import simulation

    complete = late_groups.LateGroups.complete

    def only_all(self: Any, parts: Any = None) -> None:
        if parts is None:
            complete(self)

    with (
        patch.object(late_weights.LateWeights, "complete", lambda self, params: None),
        patch.object(late_groups.LateGroups, "complete", only_all),
    ):
        return differs(config), len(simulation.found_races())


@pytest.mark.parametrize(
    ("stage", "ranks", "rule"),
    [(2, 1, "exact"), (2, 2, "exact"), (3, 1, "exact"), (2, 2, "predictive")],
)
def test_without_the_wait_of_what_is_used_weights_would_be_old(
    stage: int, ranks: int, rule: str
) -> None:
    config, pool = exact_config(stage, update_rule=rule), f"exact {stage == 3}"
    for difference, races in run_ranks(ranks, without_the_wait, config, device="sim", pool=pool):
        assert "losses" in difference or (rule == "predictive" and races)


def races_of_two_readers(config: dict[str, Any]) -> int:
    """Weights that one stream has brought are read on another one."""
    from tests.support.simulated_accelerator import device as sim
    from tests.support.simulated_accelerator import simulation

    with small_chunks():
        engine = make_engine(config, model=WithFrozen, groups=two_groups)
        train(engine, batches(2, dist.get_rank()))
        params = [param for param in engine.module.parameters() if param.requires_grad]
        assert engine.optimizer.host_optimizer.link.arrivals.are_awaited
        if engine.zero_optimization_stage() < 3:
            with sim.stream(sim.Stream()):
                engine.module.up.state_dict()
            read = [engine.module.up.weight.clone(), engine.module.up.bias.clone()]
        else:
            with sim.stream(sim.Stream()):
                late_weights.complete_weights_of(params)
            late_weights.complete_weights_of(params)
            read = [param.ds_tensor.clone() for param in params]
        sim.synchronize()
        del read
        found = len(simulation.found_races())
        engine.destroy()
    return found


@pytest.mark.parametrize(("stage", "ranks"), [(2, 1), (2, 2), (3, 2)])
def test_weights_that_one_stream_has_brought_may_be_read_on_another(stage: int, ranks: int) -> None:
    config, pool = exact_config(stage), f"exact {stage == 3}"
    races = run_ranks(ranks, races_of_two_readers, config, device="sim", pool=pool)
    assert races == [0] * ranks


def change_another_engines(config: dict[str, Any]) -> str:
    """A new engine of a model whose old one is neither done nor destroyed."""
    found = []
    for mine in (waiting(config), config):
        first = make_engine(mine, model=WithFrozen, groups=two_groups)
        train(first, batches(2, dist.get_rank()))
        plain = copy.deepcopy(mine)
        del plain["zero_optimization"]["zenflow"]
        second = make_engine(plain, model=lambda: first.module, groups=two_groups)  # noqa: B023
        found.append(weights_of(second))
        second.destroy()
        first.destroy()
    return first_difference(*found)


def destroyed(config: dict[str, Any]) -> str:
    """The weights that an engine leaves behind, destroyed directly behind a step."""
    found = []
    for mine in (waiting(config), config):
        engine = make_engine(mine, model=WithFrozen, groups=two_groups)
        train(engine, batches(2, dist.get_rank()))
        engine.destroy()
        found.append(weights_of(engine))
    return first_difference(*found)


@pytest.mark.parametrize(
    ("stage", "ranks", "rule", "device"),
    [
        (3, 1, "exact", "cpu"),
        (3, 1, "exact", "sim"),
        (2, 1, "exact", "sim"),
        (2, 2, "exact", "cpu"),
        (1, 2, "predictive", "sim"),
    ],
)
def test_a_destroyed_engine_leaves_complete_weights(
    stage: int, ranks: int, rule: str, device: str
) -> None:
    config, pool = exact_config(stage, update_rule=rule), f"exact {stage == 3}"
    assert run_ranks(ranks, destroyed, config, device=device, pool=pool) == [""] * ranks


@pytest.mark.parametrize(
    ("stage", "ranks", "rule"),
    [(3, 1, "exact"), (2, 1, "exact"), (2, 2, "exact"), (2, 2, "predictive")],
)
def test_a_second_engine_of_the_model_begins_with_complete_weights(
    stage: int, ranks: int, rule: str
) -> None:
    config, pool = exact_config(stage, update_rule=rule), f"exact {stage == 3}"
    assert run_ranks(ranks, change_another_engines, config, pool=pool) == [""] * ranks
