"""The start of a run compiles kernels for the alignments of its steps. Nothing is compiled here:
calls are recorded."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import pytest
from deepspeed import comm as dist

from deepspeed_ext.zenflow import kernels
from deepspeed_ext.zenflow.kernels import launch, prepare
from tests.support.models import batches, two_groups
from tests.support.ranks import run_ranks
from tests.support.zenflow import RULES, make_engine, train, zenflow_config

BLOCK = 32
PREPARED = {"estimates": "predict", "adam_steps": "adam_step"}


def alignments(
    config: dict[str, Any], steps: int
) -> tuple[set[tuple[str, bool]], set[tuple[str, bool]]]:
    """Kernels and alignments that the start prepares, and those that the steps launch."""
    prepared: set[tuple[str, bool]] = set()
    launched: set[tuple[str, bool]] = set()

    def recorded(name: str) -> Any:
        theirs = getattr(kernels, name)

        def call(*args: Any) -> None:
            state, *others = (*args[0], *args[1:3]) if name == "adam_step" else args[:3]
            arrays = [array for array in (state, *others) if array.numel()]
            launched.add((name, launch.is_aligned(BLOCK, arrays)))
            theirs(*args)

        return patch.object(kernels, name, call)

    def noted(name: str) -> Any:
        def call(*args: Any) -> list[Any]:
            prepared.update((PREPARED[name], aligned) for aligned in args[-1])
            return []

        return patch.object(prepare, name, call)

    with ExitStack() as patches:
        for name in PREPARED:
            patches.enter_context(noted(name))
        for name in PREPARED.values():
            patches.enter_context(recorded(name))
        engine = make_engine(config, groups=two_groups)
        train(engine, batches(steps, dist.get_rank()))
        engine.destroy()
    return prepared, launched


@pytest.mark.gpu
@pytest.mark.parametrize(("stage", "ranks"), [(1, 2), (2, 1), (2, 2), (3, 1), (3, 2)])
@pytest.mark.parametrize("ratio", [1.0, 0.5])
@pytest.mark.parametrize("hidden", [True, False])
def test_steps_launch_only_what_the_start_has_prepared(
    stage: int, ranks: int, ratio: float, hidden: bool
) -> None:
    """Partitions of odd lengths at odd offsets."""
    config = zenflow_config(stage, hide_transfers=hidden, block_size=BLOCK)
    config["zero_optimization"]["offload_optimizer"] = {"device": "cpu", "ratio": ratio}
    for prepared, launched in run_ranks(ranks, alignments, config, 6, device="accelerator"):
        assert launched
        assert launched <= prepared


@pytest.mark.gpu
def test_the_selective_rule_launches_only_what_the_start_has_prepared() -> None:
    for prepared, launched in run_ranks(
        2, alignments, zenflow_config(2, **RULES["selective"]), 6, device="accelerator"
    ):
        assert launched
        assert launched <= prepared
