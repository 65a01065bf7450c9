"""What a start and a step do in which order, so that neither memory nor copies come at the wrong
time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from deepspeed import comm as dist

from deepspeed_ext.adapter import zenflow_parts
from deepspeed_ext.runtime import memory as allocation
from deepspeed_ext.runtime import ranks as ranks_module
from deepspeed_ext.runtime.ranks import RankGroup, open_communicators
from deepspeed_ext.zenflow.step.optimizer import HostOptimizer
from deepspeed_ext.zenflow.transfers.stream import Stream
from tests.support.models import batches
from tests.support.ranks import run_ranks
from tests.support.zenflow import make_engine, train, zenflow_config


def noting(found: list[str], name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    def noted(*args: Any, **kwargs: Any) -> Any:
        found.append(name)
        return call(*args, **kwargs)

    return noted


def order_of_a_step(config: dict[str, Any]) -> list[str]:
    """When copies start in the last of some steps, and when DeepSpeed gathers persistent
    parameters."""
    found: list[str] = []
    with patch.object(Stream, "depart", noting(found, "copies", Stream.depart)):
        engine = make_engine(config)
        train(engine, batches(4, 0))
        if persistent := getattr(engine.optimizer, "persistent_parameters", None):
            persistent[0].all_gather = noting(found, "gather", persistent[0].all_gather)
        found.clear()
        train(engine, batches(1, 1))
    engine.destroy()
    return found


def copies_before_the_end(config: dict[str, Any]) -> list[str]:
    found: list[str] = []
    with (
        patch.object(Stream, "depart", noting(found, "copies", Stream.depart)),
        patch.object(HostOptimizer, "end_step", noting(found, "end", HostOptimizer.end_step)),
    ):
        engine = make_engine(config)
        train(engine, batches(12, 0))
        found.clear()
        train(engine, batches(1, 1))
    engine.destroy()
    return found


@pytest.mark.parametrize(("threshold", "first"), [(10**6, "gather"), (0, "copies")])
def test_copies_begin_after_the_gather_of_persistent_parameters_which_waits_for_the_device(
    threshold: int, first: str
) -> None:
    config = zenflow_config(3, hide_transfers=True)
    config["zero_optimization"]["stage3_param_persistence_threshold"] = threshold
    (found,) = run_ranks(1, order_of_a_step, config, device="sim")
    assert found[0] == first
    assert "copies" in found


def test_copies_still_begin_before_the_weights_are_gathered_at_stage_2() -> None:
    (found,) = run_ranks(
        1, copies_before_the_end, zenflow_config(2, hide_transfers=True), device="sim"
    )
    assert found == ["copies", "end"]


def order_of_a_start(config: dict[str, Any]) -> list[str]:
    found: list[str] = []
    opened = noting(found, "communicators", zenflow_parts.open_communicators)
    sized = noting(found, "sizes", allocation.free_accelerator_bytes)
    with (
        patch.object(zenflow_parts, "open_communicators", opened),
        patch.object(allocation, "free_accelerator_bytes", sized),
    ):
        make_engine(config).destroy()
    return found[found.index("communicators") :]


@pytest.mark.parametrize("stage", [2, 3])
def test_communicators_are_opened_before_anything_is_sized_by_free_memory(stage: int) -> None:
    (found,) = run_ranks(1, order_of_a_start, zenflow_config(stage), device="sim")
    assert found[0] == "communicators"
    assert found.count("communicators") == 1
    assert "sizes" in found


def opened() -> list[int]:
    """How many collectives each group has."""
    whole, part = RankGroup.of(None), RankGroup.of(dist.new_group([dist.get_rank()]))
    found: list[int] = []

    class Device:
        def is_synchronized_device(self) -> bool:
            return False

    def counted(self: RankGroup, *values: int) -> tuple[int, ...]:
        found.append(self.size)
        return values

    with patch.object(RankGroup, "minimum", counted):
        open_communicators([whole, part, part])
        assert found == []
        with patch.object(ranks_module, "get_accelerator", Device):
            open_communicators([part, whole, part])
    assert torch.distributed.is_initialized()
    return found


def test_every_group_has_a_first_collective_and_none_where_the_cpu_is_the_accelerator() -> None:
    assert run_ranks(2, opened) == [[1, 2, 1]] * 2
