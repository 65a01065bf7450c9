"""DeepSpeed's ``safe_get_*`` and ``safe_set_*`` see masters, moments and gradients as they are, at
any step."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed import comm as dist
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_grad

from tests.support.models import batches, on_device, two_groups
from tests.support.ranks import RankError, run_ranks
from tests.support.zenflow import make_engine, offload_config, train, zenflow_config

pytestmark = pytest.mark.sampled(6)


def in_order(
    config: dict[str, Any], round_robin: bool, extended: bool = True
) -> dict[Any, torch.Tensor]:
    """Masters and gradients by name."""
    config["zero_optimization"]["round_robin_gradients"] = round_robin
    engine = make_engine(config, extended=extended, groups=two_groups)
    rank = dist.get_rank()
    train(engine, batches(3, rank))
    found: dict[Any, torch.Tensor] = {}
    engine.backward(engine(on_device(batches(1, rank, seed=2)[0])))
    for name, parameter in engine.module.named_parameters():
        found[name, "master"] = safe_get_full_fp32_param(parameter).float().cpu().clone()
        found[name, "gradient"] = safe_get_full_grad(parameter).float().cpu().clone()
    engine.destroy()
    return found


@pytest.mark.parametrize("rule", ["ZeRO", "ZeRO-Offload", "predictive"])
@pytest.mark.parametrize("stage", [1, 2])
def test_with_round_robin_each_parameter_has_its_own_state(stage: int, rule: str) -> None:
    """With DeepSpeed's optimizer it has another's, whose gradient has another size here."""
    config = zenflow_config(stage, torch.float32, overlap_step=False)
    if rule != "predictive":
        config = offload_config(config)
    if rule == "ZeRO":
        del config["zero_optimization"]["offload_optimizer"]
    for expected, actual in zip(
        run_ranks(2, in_order, config, False), run_ranks(2, in_order, config, True), strict=True
    ):
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-7)
    if (stage, rule) == (2, "ZeRO"):
        with pytest.raises(RankError, match="must match the size"):
            run_ranks(2, in_order, config, True, extended=False)


def destroyed(config: dict[str, Any]) -> tuple[int, int]:
    """Bytes of shared memory that this process has before and after `destroy`, with the engine and
    what `state_dict` returned still there."""
    engine = make_engine(config, model=partial(torch.nn.Linear, 512, 512))
    engine.backward(engine(torch.ones(1, 512, dtype=torch.bfloat16)).sum())
    engine.step()
    kept, before = engine.optimizer.state_dict(), shared_bytes()
    engine.destroy()
    assert kept
    return before, shared_bytes()


def shared_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("RssShmem"))


@pytest.mark.parametrize("stage", [2, 3])
def test_a_destroyed_engine_frees_its_state_although_it_is_referred_to(stage: int) -> None:
    ((before, after),) = run_ranks(1, destroyed, zenflow_config(stage, torch.bfloat16))
    assert before - after > 6 * 512 * 512  # p, m and v of half the elements at least
