"""Binds the threads of this process, which all its engines share.

The first binding records the threads' previous state, and the end of the last binding restores it.
In between, the plan of the latest binding is in force.
"""

import os
from dataclasses import dataclass

from deepspeed_ext.cores import initial_mask
from deepspeed_ext.cores.allowed import omp_binding
from deepspeed_ext.cores.openmp import ThreadCount, start_pool
from deepspeed_ext.cores.plan import RankPlan
from deepspeed_ext.cores.thread_masks import Masks, confine, restore, thread_masks
from deepspeed_ext.runtime.log import logger, warn_once

__all__ = ["bind", "confine_again", "in_force", "release"]


@dataclass
class _Before:
    """State of the threads before any binding."""

    masks: Masks
    counts: ThreadCount | None = None
    """None: not changed yet."""


_plans: list[RankPlan] = []
_before: _Before | None = None


def in_force() -> RankPlan | None:
    """Return the plan that this process's threads follow; None if they are unbound."""
    return _plans[-1] if _plans else None


def bind(plan: RankPlan, allowed: frozenset[int]) -> None:
    """Confine every thread to the CPUs that `plan` has for PyTorch, until `release`, which must be
    called even if this raises.

    Args:
        allowed: the CPUs from which it was made; while a binding is active, further plans are made
            from them, too.

    Raises:
        OSError: the kernel refused, or does not tell the threads' masks.
    """
    global _before
    previous = in_force()
    # first, because the garbage collector may call `release` for another engine at any point
    _plans.append(plan)
    if _before is None:
        _before = _Before(thread_masks())
        initial_mask.keep(allowed)
    elif previous != plan:
        restore(_before.masks)
    _apply(plan, _before)


def _apply(plan: RankPlan, before: _Before) -> None:
    setting = omp_binding(os.environ)
    _confine(plan)
    counts = ThreadCount.change(plan.pytorch_threads)
    before.counts = before.counts or counts
    if setting is not None:
        warn_once(
            f"core binding: {setting} makes OpenMP bind threads itself. "
            "They are moved into the plan; unset it"
        )
        # The runtime binds each new thread to the places that it read when it was loaded. It has
        # bound the main thread to the first of them, and other threads inherit that mask.
        start_pool(plan.pytorch_threads)
        os.sched_setaffinity(os.getpid(), plan.pytorch)
    _confine(plan)


def _confine(plan: RankPlan) -> None:
    confine(plan.pytorch, one_each="isolated" in plan.flags)


def confine_again(plan: RankPlan) -> None:
    """Confine the threads that have started outside the plan in force; `plan` if none is.

    Raises:
        OSError: the kernel refused.
    """
    _confine(in_force() or plan)


def release(plan: RankPlan) -> None:
    """End a binding: the previous binding's plan applies again or, after the last one, the original
    state. Never raises."""
    global _before
    if plan not in _plans:
        return
    ended = in_force()
    _plans.remove(plan)
    left = in_force()
    if left == ended or _before is None:
        return
    restore(_before.masks)
    if left is not None:
        try:
            _apply(left, _before)
        except Exception as error:
            logger.warning(
                "core binding: cannot confine the threads "
                f"to CPUs {list(left.pytorch)} again ({error})"
            )
        return
    if _before.counts is not None:
        _before.counts.restore()
    initial_mask.keep(None)
    _before = None
