"""A share of the optimizer on the accelerator (``offload_optimizer.ratio``): the same training,
with p, m and v in two places."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed import comm as dist
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from deepspeed_ext.adapter.zero_config import ZeroConfig
from deepspeed_ext.checkpoint.legacy_state import CollectedValues
from deepspeed_ext.errors import ConfigError
from deepspeed_ext.zenflow.plan.plan import head_of
from deepspeed_ext.zenflow.worker.kernel.adam_pass import AdamStep
from tests.support.models import batches, two_groups
from tests.support.ranks import run_ranks
from tests.support.same import assert_same
from tests.support.state_access import state_of
from tests.support.zenflow import RULES, full_masters_of, make_engine, train, zenflow_config

pytestmark = pytest.mark.sampled(6)

CODED = {"state_dtype": "int8"}


def config_of(
    stage: int,
    ratio: float | str,
    rule: str = "predictive",
    dtype: torch.dtype = torch.float32,
    **fields,
):
    config = zenflow_config(stage, dtype, **{**RULES[rule], **fields})
    config["zero_optimization"]["offload_optimizer"] = {"device": "cpu", "ratio": ratio}
    return config


def saved_elsewhere(config: dict[str, Any], folder: str) -> list[torch.Tensor]:
    """Train five steps, of which the last is not handed over; save; return p as training sees it
    after the sixth."""
    engine = make_engine(config, groups=two_groups)
    train(engine, batches(5, 0))
    engine.save_checkpoint(folder, tag="t")
    masters = full_masters_of(engine)
    engine.destroy()
    return masters


def loaded_elsewhere(config: dict[str, Any], folder: str) -> tuple[list[torch.Tensor], list[float]]:
    engine = make_engine(config, groups=two_groups)
    engine.load_checkpoint(folder, tag="t")
    masters = full_masters_of(engine)
    losses = train(engine, batches(3, 0))
    engine.destroy()
    return masters, losses


@pytest.mark.parametrize(
    ("there", "fields"),
    [
        ((2, 2, 0.7), {}),
        ((2, 1, 1.0), {}),
        ((3, 2, 0.25), {}),
        ((2, 2, 0.0), {}),
        ((2, 2, 0.7), CODED),
        ((3, 1, 0.0), CODED),
        ((2, 1, 1.0), CODED),
    ],
)
def test_a_checkpoint_is_loaded_with_another_share_by_other_ranks_at_another_stage(
    there: tuple[int, int, float], fields: dict[str, Any], tmp_path: Path
) -> None:
    """Mid-interval: gradients that wait for the worker are applied to the host's part alone, all
    others have been. So what is loaded does not depend on where it is loaded."""
    stage, ranks, ratio = there
    run_ranks(2, saved_elsewhere, config_of(2, 0.4, **fields), str(tmp_path))
    expected, _ = run_ranks(1, loaded_elsewhere, config_of(1, 0.5), str(tmp_path))[0]
    for masters, losses in run_ranks(
        ranks, loaded_elsewhere, config_of(stage, ratio, **fields), str(tmp_path)
    ):
        assert_same(expected, masters, "masters")
        assert all(map(math.isfinite, losses))


@given(st.data())
def test_collected_gradients_reach_only_the_part_on_the_host(data: st.DataObject) -> None:
    block = data.draw(st.sampled_from([1, 4, 8]))
    head, host = block * data.draw(st.integers(0, 5)), data.draw(st.integers(1, 40))
    gradient = torch.randn(host)
    step = {
        "lr": 0.1,
        "beta1": 0.9,
        "beta2": 0.9,
        "eps": 1e-8,
        "weight_decay": 0.0,
        "decoupled": True,
    }
    values = CollectedValues(
        numel=head + host,
        on_accelerator=head,
        collected=[AdamStep(**step, step=1, grad_scale=1.0)],
        gradients=[gradient],
    )
    whole = tuple(torch.zeros(head + host) for _ in range(3))
    values.catch_up(whole, block)
    assert not whole[1][:head].any()
    assert torch.allclose(whole[1][head:], 0.1 * gradient)
    begin = block * data.draw(st.integers(0, (head + host) // block))
    end = min(head + host, begin + block * data.draw(st.integers(0, 12)))
    part = tuple(torch.zeros(end - begin) for _ in range(3))
    values.catch_up(part, block, begin)
    assert all(
        torch.equal(found, expected[begin:end]) for found, expected in zip(part, whole, strict=True)
    )


def moments_after_one_step(config: dict[str, Any]) -> list[dict[Any, torch.Tensor]]:
    """The moments of a run with everything on the host, and of one with a share."""
    found = []
    for ratio in (1.0, 0.4):
        config["zero_optimization"]["offload_optimizer"]["ratio"] = ratio
        engine = make_engine(config, groups=two_groups)
        train(engine, batches(1, dist.get_rank()))
        found.append({key: values for key, values in state_of(engine).items() if key[1]})
        engine.destroy()
    return found


@pytest.mark.parametrize("states", ["bfloat16", "int8"])
@pytest.mark.parametrize("stage", [2, 3])
def test_moments_are_rounded_alike_wherever_they_step(stage: int, states: str) -> None:
    """To the bit, in the step whose moments depend on the gradient alone: a random number goes by
    the place in the whole partition."""
    config = config_of(stage, 1.0, dtype=torch.bfloat16, state_dtype=states, overlap_step=False)
    config["gradient_clipping"] = 0.0
    for everywhere, shared in run_ranks(2, moments_after_one_step, config):
        assert any(values.any() for values in everywhere.values())
        assert_same(everywhere, shared)


@pytest.mark.parametrize(
    ("ratio", "zenflow"), [("auto", False), (1.5, True), ("half", True), (0.5, False)]
)
def test_a_ratio_that_means_nothing_is_refused_by_name(ratio: object, zenflow: bool) -> None:
    section = {"stage": 2, "offload_optimizer": {"device": "cpu", "ratio": ratio}}
    with pytest.raises((ConfigError, ValidationError), match=r"ratio|Partial offloading"):
        ZeroConfig(**section, **({"zenflow": {}} if zenflow else {}))


@given(st.integers(0, 10_000), st.floats(0, 1), st.sampled_from([1, 32, 256]))
def test_a_ratio_is_obeyed_to_within_one_block(numel: int, ratio: float, block: int) -> None:
    there = head_of(numel, ratio, block)
    assert there % block == 0
    assert 0 <= there <= numel
    assert abs((numel - there) - ratio * numel) < block
