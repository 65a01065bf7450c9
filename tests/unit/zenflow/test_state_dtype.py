"""``zenflow.state_dtype``: moments of 16 or 8 bits. Close to exact training, and as exact as that
to resume."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed import comm as dist
from deepspeed.utils import safe_get_full_optimizer_state, safe_set_full_optimizer_state

from tests.support.log import heard
from tests.support.models import batches, two_groups
from tests.support.ranks import run_ranks
from tests.support.resharded import Model, Run, data, everyones, saved_by, state_of
from tests.support.resident import resident_bytes
from tests.support.same import first_difference
from tests.support.zenflow import make_engine, train, zenflow_config

pytestmark = pytest.mark.sampled()


def rounded(
    states: str, stage: int, dtype: torch.dtype = torch.bfloat16, **how: Any
) -> dict[str, Any]:
    return zenflow_config(stage, dtype, state_dtype=states, **how)


def moments_and_bytes(config: dict[str, Any]) -> tuple[set[torch.dtype], float]:
    """Dtypes of the moments, and bytes of state in the arena per element. DeepSpeed's setting is
    said to have no effect where it has none."""
    with heard("bf16_optimizer_states has no effect") as told:
        engine = make_engine(config)
    train(engine, batches(2, dist.get_rank()))
    adam = engine.optimizer.host_optimizer
    found = {moment.dtype for partition in adam.state.partitions for moment in partition.moments}
    kinds = (*adam.kind.layout.kinds, *adam.kind.layout.scales)
    arrays = [array.spec for array in adam.link.arena.layout.arrays if array.spec.kind in kinds]
    numel = sum(state.master.numel() for state in adam.state.wholes)
    engine.destroy()
    is_set = config["bf16"].get("bf16_optimizer_states", False)
    assert len(told) == (is_set and found == {torch.float32})
    return found, sum(spec.nbytes for spec in arrays) / numel


@pytest.mark.parametrize("stage", [2, 3])
def test_moments_take_less_memory(stage: int) -> None:
    """With 8 bits, also a scale for each block of 32; a partition here has up to 31 elements beside
    whole blocks."""
    assert run_ranks(1, moments_and_bytes, rounded("bfloat16", stage)) == [({torch.bfloat16}, 8.0)]
    assert run_ranks(1, moments_and_bytes, zenflow_config(stage)) == [({torch.float32}, 12.0)]
    ((dtypes, nbytes),) = run_ranks(1, moments_and_bytes, rounded("int8", stage))
    assert dtypes == {torch.int8, torch.uint8}
    assert 6.0 + 2 / 32 <= nbytes < 6.0 + 2.1 / 32


@pytest.mark.parametrize("stage", [2, 3])
def test_deepspeeds_own_setting_asks_for_it(stage: int) -> None:
    theirs = {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
    assert run_ranks(1, moments_and_bytes, zenflow_config(stage) | {"bf16": theirs})[0][1] == 8.0
    explicit = zenflow_config(stage, state_dtype="float32") | {"bf16": theirs}
    assert run_ranks(1, moments_and_bytes, explicit)[0][1] == 12.0
    selective = zenflow_config(stage, topk_ratio=0.1) | {"bf16": theirs}
    assert run_ranks(1, moments_and_bytes, selective)[0][1] == 12.0


# -- state -----------------------------------------------------------------------------------------


def rounds_on_load(run: Run, folder: str) -> tuple[str, list[float]]:
    """How what has arrived differs from the saved values, rounded to the nearest; the losses that
    follow. With 8 bits, moments that are off by less than the largest distance between two values
    do not count."""
    engine = make_engine(run.config, model=partial(Model, 1.0), groups=two_groups)
    engine.load_checkpoint(folder, tag="t")
    expected, arrived = torch.load(Path(folder, "expected"))["state"], state_of(engine)
    largest = [
        max(values[i].abs().max() for name, values in expected.items() if name != "step")
        for i in range(3)
    ]
    for name, values in expected.items():
        if name == "step":
            continue
        expected[name] = [values[0], *(value.bfloat16().float() for value in values[1:])]
        for i, step in ((1, 2 / 87), (2, 2 / 169)):
            close = (arrived[name][i] - values[i]).abs() <= step * largest[i]
            if run.setting == "coded":
                expected[name][i] = torch.where(close, arrived[name][i], values[i])
    found = first_difference(expected, arrived, "arrived"), everyones(train(engine, data(4, 7)))
    engine.destroy()
    return found


MORE_BITS = [
    (Run(2, 2, way, setting), Run(ranks, stage, "predictive", states))
    for way, setting in (("predictive", "bf16"), ("offload", "bf16"), ("predictive", "rounded"))
    for ranks, stage, states in (
        (2, 2, "rounded"),
        (1, 3, "rounded"),
        (2, 2, "coded"),
        (1, 3, "coded"),
    )
]
OTHER_BLOCKS = [
    (Run(2, 2, "predictive", "coded"), Run(ranks, stage, "predictive", "coded"))
    for ranks, stage in ((1, 3), (3, 2))
]
"""On other ranks, where other elements are in a block."""


@pytest.mark.sampled(9)
@pytest.mark.parametrize(("saved", "loaded"), [*MORE_BITS, *OTHER_BLOCKS])
def test_moments_are_rounded_once_when_they_are_loaded(
    saved: Run, loaded: Run, tmp_path: Path
) -> None:
    """On the same ranks and on others, from ZenFlow and from plain ZeRO-Offload; training goes on
    much the same."""
    folder, losses = saved_by(saved, tmp_path)
    for problem, rest in run_ranks(loaded.ranks, rounds_on_load, loaded, folder, pool=loaded.pool):
        assert problem == ""
        assert rest == pytest.approx(losses, rel=0.02)


def written(config: dict[str, Any]) -> list[bool]:
    """Whether a moment that the user sets is read back, rounded to bfloat16; one of 8 bits is
    rounded once it is taken, to a value that is near in its block."""
    engine = make_engine(config)
    train(engine, batches(3, dist.get_rank()))
    parameter = next(p for p in engine.module.parameters() if p.requires_grad)
    same = []
    for key in ("exp_avg", "exp_avg_sq"):
        value = torch.rand_like(safe_get_full_optimizer_state(parameter, key).float())
        safe_set_full_optimizer_state(parameter, value, key)
        found = safe_get_full_optimizer_state(parameter, key).float()
        host = engine.optimizer.host_optimizer
        if not host.kind.layout.is_coded:
            same.append(torch.equal(found, value.bfloat16().float()))
            continue
        same.append(torch.equal(found, value))
        host.state.take_back()
        rounding = (safe_get_full_optimizer_state(parameter, key) - value).abs()
        same.append(bool(0 < rounding.max() < 1 / 80))
    train(engine, batches(2, dist.get_rank()))
    engine.destroy()
    return same


@pytest.mark.parametrize("states", ["bfloat16", "int8"])
@pytest.mark.parametrize("stage", [2, 3])
def test_a_moment_that_is_set_is_rounded(states: str, stage: int) -> None:
    (found,) = run_ranks(1, written, rounded(states, stage))
    assert all(found)


def arena_bytes(config: dict[str, Any], folder: str) -> list[int]:
    """Bytes of the arena in memory beyond those between steps: after a save, after its load, after
    a look at a moment, and after the step that follows; and of the moments in fp32."""
    engine = make_engine(config)
    train(engine, batches(3, dist.get_rank()))
    arena = engine.optimizer.host_optimizer.link.arena
    between = resident_bytes(arena)
    engine.save_checkpoint(folder, tag="t")
    found = [resident_bytes(arena)]
    engine.load_checkpoint(folder, tag="t")
    found.append(resident_bytes(arena))
    safe_get_full_optimizer_state(next(engine.module.parameters()), "exp_avg")
    found.append(resident_bytes(arena))
    train(engine, batches(1, dist.get_rank()))
    found.append(resident_bytes(arena))
    shown = sum(
        moment.nbytes
        for state in engine.optimizer.host_optimizer.state.wholes
        for moment in state.moments.values()
    )
    engine.destroy()
    return [*(each - between for each in found), shown]


@pytest.mark.parametrize(("stage", "async_save"), [(2, False), (3, True)])
def test_codes_are_shown_only_to_those_who_look(
    stage: int, async_save: bool, tmp_path: Path
) -> None:
    config = rounded("int8", stage, async_save=async_save)
    ((saved, loaded, looked, stepped, shown),) = run_ranks(1, arena_bytes, config, str(tmp_path))
    assert saved == loaded == stepped == 0
    assert shown <= looked
