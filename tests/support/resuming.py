"""Saving after every step of a run and resuming from each of these checkpoints in other
processes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from deepspeed import comm as dist

from tests.support.models import batches, two_groups
from tests.support.ranks import run_ranks
from tests.support.same import first_difference
from tests.support.zenflow import full_masters_of, make_engine, train, weights_of


def final_state(engine: Any) -> dict[str, Any]:
    return {"weights": weights_of(engine), "masters": full_masters_of(engine)}


def train_and_save(config: dict, first: int, last: int, folder: str) -> str:
    """Train to `last + 2` straight, and again saving after each of the steps `first` .. `last`; how
    they differ."""
    data = batches(last + 2, dist.get_rank())
    engine = make_engine(config, groups=two_groups)
    losses = train(engine, data)
    expected = final_state(engine)
    engine.destroy()
    kernel = engine.optimizer.host_optimizer.link.process.ready.kernel
    torch.save(
        {"losses": losses, "state": expected, "kernel": kernel},
        Path(folder, f"expected-{dist.get_rank()}.pt"),
    )

    engine = make_engine(config, groups=two_groups)
    saving = []
    for step in range(1, last + 3):
        saving += train(engine, data[step - 1 : step])
        if first <= step <= last:
            engine.save_checkpoint(folder, tag=str(step))
    difference = first_difference(
        (losses, expected), (saving, final_state(engine)), "saving: losses, state"
    )
    engine.destroy()
    return difference


def resume_from_each(config: dict, first: int, last: int, folder: str) -> list[str]:
    """Where a resumed run differs from the uninterrupted one; every second engine is used before it
    loads."""
    data = batches(last + 2, dist.get_rank())
    expected = torch.load(Path(folder, f"expected-{dist.get_rank()}.pt"))
    failed = []
    for step in range(first, last + 1):
        engine = make_engine(config, groups=two_groups)
        if step % 2:
            train(engine, batches(2, 77))
        engine.load_checkpoint(folder, tag=str(step))
        kernel = engine.optimizer.host_optimizer.link.process.ready.kernel
        assert kernel == expected["kernel"], "kernels differ in their last bits"
        rest = train(engine, data[step:])
        wanted = (expected["losses"][step:], expected["state"])
        failed.append(
            first_difference(
                wanted, (rest, final_state(engine)), f"from step {step}: losses, state"
            )
        )
        engine.destroy()
    return failed


def failed_resumes(
    ranks: int,
    config: dict,
    first: int,
    last: int,
    folder: str,
    device: str = "cpu",
    bodies: tuple[Callable[..., str], Callable[..., list[str]]] = (
        train_and_save,
        resume_from_each,
    ),
) -> list[str]:
    """Train and save in one set of processes, resume in another; what differs on any rank, to the
    bit.

    `bodies` do that, with the arguments of these functions. Both run the same settings in the same
    order and nothing else: DeepSpeed's stage 3 leaves another ``torch.nn.functional.linear`` behind
    in its process, which rounds differently."""
    steps = (config, first, last, folder)
    changed = run_ranks(
        ranks, bodies[0], *steps, device=device, pool="to save", timeout_seconds=280
    )
    failed = run_ranks(
        ranks, bodies[1], *steps, device=device, pool="to resume", timeout_seconds=280
    )
    return [difference for on_one in (changed, *failed) for difference in on_one if difference]
