"""When copies beside the step start, and how much of the trainer's thread they take. Counted in a
model of time."""

from __future__ import annotations

from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch

from deepspeed_ext.runtime.memory import PageLocks
from deepspeed_ext.zenflow.plan import places
from deepspeed_ext.zenflow.plan.places import MOST_CHUNKS, chunk_numel
from deepspeed_ext.zenflow.transfers.courier import Courier, Parcel
from deepspeed_ext.zenflow.worker.kernel.passes import chunk_of
from deepspeed_ext.zenflow.worker.messages import WorkerTask
from tests.simulated.overlap import WIDTH
from tests.support.models import Linears, on_device
from tests.support.ranks import run_ranks
from tests.support.streams import plan_of, stream_of
from tests.support.zenflow import make_engine, zenflow_config

GATHER_US = 1000.0


def first_copy_and_last_gather(config: dict[str, Any]) -> tuple[float, float]:
    """When the gradients of a step begin to leave the device, and when its last collective ends."""
    from tests.support.simulated_accelerator import simulation

    engine = make_engine(config, model=partial(Linears, 8, WIDTH))
    rows = on_device(torch.randn(4, WIDTH).bfloat16())
    for _ in range(3):
        engine.backward(engine(rows))
        engine.step()
    engine.backward(engine(rows))
    # The gradients take milliseconds, and single values of the host a microsecond.
    speeds = {
        "operator_us": 10.0,
        "collective_us": GATHER_US,
        "network_gb_per_s": 1e6,
        "copy_us": 0.0,
    }
    with simulation.timeline(**speeds, link_gb_per_s=0.01) as spans:
        engine.step()
    engine.destroy()
    copies = [
        span.begin_us
        for span in spans
        if span.lane == "copy down" and span.end_us - span.begin_us >= 100.0
    ]
    assert copies
    return min(copies), max(span.end_us for span in spans if span.lane == "communication")


def test_gradients_leave_while_the_new_weights_are_gathered() -> None:
    """Not at stage 3, where DeepSpeed waits for the device after it has gathered the small
    parameters (`test_after_the_gather`)."""
    config = zenflow_config(2, hide_transfers=True)
    config["gradient_clipping"] = 0.0
    config["timers"] = {"throughput": {"enabled": False}}  # it waits for the device in every step
    found = run_ranks(2, first_copy_and_last_gather, config, device="sim", pool="overlap, stage 2")
    for copies_begin, gathers_end in found:
        assert copies_begin <= gathers_end - GATHER_US / 2


@pytest.mark.parametrize("block_size", [8, 32, 256])
@pytest.mark.parametrize("numel", [1, 10**6, 10**9, 7 * 10**9, 10**12 + 1])
def test_there_are_at_most_64_whole_chunks(numel: int, block_size: int) -> None:
    chunk = chunk_numel(numel, block_size)
    assert chunk % block_size == 0
    assert -(-numel // chunk) <= MOST_CHUNKS
    assert chunk >= chunk_of(places.CHUNK_NUMEL, block_size)
    assert (
        chunk == chunk_of(places.CHUNK_NUMEL, block_size)
        or (chunk - block_size) * MOST_CHUNKS < numel
    )


def test_a_chunk_is_of_whole_blocks_and_has_at_least_one() -> None:
    assert [chunk_of(numel, 256) for numel in (1, 256, 511, 512)] == [256, 256, 256, 512]


SCALE = 1 << 14
"""Chunks and partitions are so much smaller than real ones: the numbers of launches are the
same."""
PARAMETERS = 7 * 10**9


def launches(numels: list[int]) -> tuple[int, int]:
    """Tasks that the trainer's thread launches in one step for copies beside it, and parcels."""
    from deepspeed.accelerator import get_accelerator

    from tests.support.simulated_accelerator import simulation

    parcels, send, device = list[Parcel](), Courier.send, get_accelerator().current_device_name()

    def noted(courier: Courier, sent: list[Parcel], *more: Any) -> None:
        parcels.extend(sent)
        send(courier, sent, *more)

    with (
        patch.object(places, "CHUNK_NUMEL", places.CHUNK_NUMEL // SCALE),
        patch.object(Courier, "send", noted),
    ):
        dtypes = "bfloat16", "bfloat16"
        plan = plan_of(numels, "beside", dtypes=dtypes, overlapped=True)
        stream, arena, _ = stream_of(plan)
        slots = [arena.tensor("g", index) for index in range(len(numels))]
        gradients = [torch.zeros_like(slot, device=device) for slot in slots]
        locks = PageLocks()
        locks.lock([arena.tensor(*spec.key) for spec in plan.arena if spec.exchanged])
        tasks = [WorkerTask(index, 0, None, 1) for index in range(len(numels))]
        free = {"operator_us": 0.0, "memory_gb_per_s": 1e9, "copy_us": 0.0, "link_gb_per_s": 1e9}
        with simulation.timeline(launch_us=1.0, collective_us=0.0, network_gb_per_s=1e9, **free):
            for index, gradient in enumerate(gradients):
                stream.take(index, gradient, slots[index], stream.ready())
            stream.depart(tasks, {})
            count = round(simulation.library.now_us())
            stream.wait()
            before = round(simulation.library.now_us())
            for index in range(len(numels)):
                list(stream.parts(index))
            count += round(simulation.library.now_us()) - before
        stream.close()
        locks.unlock()
    return count, len(parcels)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("partitions", "most_launches"),
    [([PARAMETERS], 160), ([10**9] * 7, 240), ([6 * 10**9, 10**9], 180)],
    ids=["stage 2", "stage 3, sub-groups of a billion", "two parameter groups"],
)
def test_copies_of_7_billion_parameters_take_few_launches(
    partitions: list[int], most_launches: int
) -> None:
    numels = [numel // SCALE // 32 * 32 for numel in partitions]
    [(count, parcels)] = run_ranks(1, launches, numels, device="sim")
    assert parcels <= MOST_CHUNKS + len(partitions)
    assert 2 * parcels < count <= most_launches
