"""An optimizer process without a trainer's engine: plans, passes, and waiting for its end."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace

import psutil

from deepspeed_ext.zenflow.plan.arrays import plan_layout
from deepspeed_ext.zenflow.worker.arena import Arena
from deepspeed_ext.zenflow.worker.kernel.adam_pass import ADAM_STATE, AdamStep, Publish
from deepspeed_ext.zenflow.worker.kernel.native import library_path
from deepspeed_ext.zenflow.worker.messages import WorkerPlan, WorkerTask
from deepspeed_ext.zenflow.worker.process import OptimizerProcess
from tests.support.arenas import arena_of
from tests.support.waiting import GENEROUS_SECONDS

NUMEL = 10_000
STEP = AdamStep(1e-3, 0.9, 0.95, 1e-8, 0.1, True, 1, 1.0)
PASS = WorkerTask(0, 0, Publish.exact(STEP.bias_correction2_sqrt, STEP.eps), STEP)


def make_plan(numel: int = NUMEL, **changes) -> WorkerPlan:
    """A plan for one partition of `numel` elements; `changes` are other fields of it."""
    layout = plan_layout(arena_of(numel))
    return replace(WorkerPlan(layout, ADAM_STATE, 32, None, 1, library_path()), **changes)


@contextmanager
def running(
    numel: int = NUMEL, timeout_seconds: float = 60.0, **changes
) -> Iterator[tuple[Arena, OptimizerProcess]]:
    """An arena and its process, which is closed at the end; `changes` are fields of the plan."""
    plan = make_plan(numel, **changes)
    arena = Arena.create(plan.layout)
    process = OptimizerProcess(arena, plan, rank=3, timeout_seconds=timeout_seconds)
    with closing(process):
        yield arena, process


def gone(pid: int) -> bool:
    """Whether the process ends soon; a zombie has ended."""
    deadline = time.monotonic() + GENEROUS_SECONDS
    while time.monotonic() < deadline:
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.02)
    return False


def step_for_ever(process: OptimizerProcess) -> None:
    """Submit and wait until the process raises an error."""
    while True:
        process.submit([PASS])
        process.wait()
