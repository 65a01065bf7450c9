"""What makes a missing synchronisation of ZenFlow's copies visible: late producers, poisoned
targets, waiting copies.

All of it is about the copies between an accelerator and the arena. Where the CPU is the accelerator
there are no streams and everything happens in order: then `late_and_poisoned` shows only that
nothing is read before it is written.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import wraps
from typing import Any
from unittest.mock import patch

import torch
from deepspeed.accelerator import get_accelerator

from deepspeed_ext.zenflow.optimizers.adam import AdamKind
from deepspeed_ext.zenflow.plan.arrays import ArrayKey
from deepspeed_ext.zenflow.rules.predictive import PredictiveRule
from deepspeed_ext.zenflow.rules.selective import SelectiveRule
from deepspeed_ext.zenflow.step.optimizer import HostOptimizer
from deepspeed_ext.zenflow.transfers.stream import Stream
from deepspeed_ext.zenflow.worker.arena import Arena
from deepspeed_ext.zenflow.worker.messages import Work, WorkerTask
from deepspeed_ext.zenflow.worker.process import OptimizerProcess

# a matrix product of 137 GFLOP: 1.1 TFLOP, some 20 ms of a large GPU in fp32
DELAY_WIDTH, DELAY_PRODUCTS = 4096, 8


def delay() -> None:
    """Keep the current stream busy for a while with a chain of matrix products; the host does not
    wait."""
    accelerator = get_accelerator()
    # the simulated accelerator is late by itself
    needs_work = accelerator.device_name() not in ("cpu", "sim")
    width, products = (DELAY_WIDTH, DELAY_PRODUCTS) if needs_work else (16, 1)
    x = torch.full((width, width), 1.0 / width, device=accelerator.current_device_name())
    for _ in range(products):
        x = x @ x


@contextmanager
def late_and_poisoned(*, waits: bool = True) -> Iterator[dict[str, int]]:
    """Let every copy's source be late and every copy's target hold NaN before; correct code notices
    nothing.

    Down: a gradient is NaN until a long chain on its stream has ended, and so is the place it is
    copied to, unless the newest y is there, which the accelerator may still read. Up: what the
    worker published, and its block means, turn into NaN when the next submission begins, by when
    they must have been read, while the reads themselves are held up by a long chain; the weights
    they go to are NaN before. It is y of the submission before that turns into NaN, unless a
    gradient has taken its place. Hot state is stepped behind such a chain.

    Args:
        waits: False leaves out that a gradient's copy inside the step waits for the gradient, the
            mistake that the tests must be able to see. The copy waits for the NaN instead. Without
            that it might be done before them, while other processes have the device.

    Yields:
        How often each kind of copy was poisoned.
    """
    poison = _Poison()
    with ExitStack() as stack:
        if not waits:
            _patch(stack, Stream, "take", poison.take)
        _patch(stack, HostOptimizer, "step_partition", poison.step_partition)
        _patch(stack, AdamKind, "predict", poison.predict)
        _patch(stack, Stream, "_bring_up", poison.bring_up)
        _patch(stack, PredictiveRule, "_read_results", poison.read_results)
        _patch(stack, OptimizerProcess, "submit", poison.submit)
        _patch(stack, SelectiveRule, "to_hand_over", poison.step_hot)
        yield poison.counts


class _Poison:
    """Methods that take a method of the package and return one that is late and poisoned."""

    def __init__(self) -> None:
        self.counts = dict.fromkeys(("gradients", "published", "block means", "hot state"), 0)
        self._arenas: dict[OptimizerProcess, Arena] = {}
        # by process, partition and span: the slot of its y
        self._published: dict[tuple[Any, ...], int] = {}
        self._poisoned: Any = None  # recorded when the newest gradient is NaN; None: no streams

    def step_partition(self, original: Callable[..., None]) -> Callable[..., None]:
        def method(adam: HostOptimizer, index: int, grad: torch.Tensor, grad_scale: float) -> None:
            self._arenas[adam.link.process] = adam.link.arena
            slot = adam.coming_slot(index)
            if grad.data_ptr() != slot.data_ptr():
                self.counts["gradients"] += 1
                produced = grad.clone()
                newest = adam.link.arena.tensor("y", index, adam.rule.schedule.handed_over)
                if newest.data_ptr() != slot.data_ptr():
                    slot.fill_(float("nan"))
                grad.fill_(float("nan"))
                self._poisoned = adam.link.stream.ready()
                delay()
                grad.copy_(produced)
            original(adam, index, grad, grad_scale)

        return method

    def take(self, original: Callable[..., None]) -> Callable[..., None]:
        def method(
            transfers: Stream, index: int, grad: torch.Tensor, slot: torch.Tensor, ready: Any
        ) -> None:
            too_early = self._poisoned or get_accelerator().Event()  # the latter: never recorded
            original(transfers, index, grad, slot, ready and too_early)

        return method

    def predict(self, original: Callable[..., None]) -> Callable[..., None]:
        def method(
            kind: AdamKind, estimate: Any, weights: torch.Tensor, *args: Any, **kwargs: Any
        ) -> None:
            weights.fill_(float("nan"))
            delay()
            original(kind, estimate, weights, *args, **kwargs)

        return method

    def bring_up(self, original: Callable[..., None]) -> Callable[..., None]:
        def method(stream: Stream, key: Any, copies: Any, slot: Any) -> None:
            up = nullcontext() if stream._up is None else get_accelerator().stream(stream._up)
            with torch.no_grad(), up:
                for target, _ in copies:
                    target.fill_(-1 if target.dtype is torch.int32 else float("nan"))
                delay()
            original(stream, key, copies, slot)

        return method

    def read_results(self, original: Callable[..., None]) -> Callable[..., None]:
        def method(rule: PredictiveRule) -> None:
            delay()
            original(rule)

        return method

    def submit(self, original: Callable[..., int]) -> Callable[..., int]:
        def method(process: OptimizerProcess, tasks: Sequence[Work]) -> int:
            for task in tasks:  # all that the worker wrote there before must have been read
                if isinstance(task, WorkerTask):
                    self._poison_results(process, task)
            return original(process, tasks)

        return method

    def step_hot(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def method(rule: SelectiveRule, *args: Any) -> torch.Tensor | None:
            self.counts["hot state"] += 1
            delay()
            return original(rule, *args)

        return method

    def _poison_results(self, process: OptimizerProcess, task: WorkerTask) -> None:
        arena, here = self._arenas[process], (process, task.partition, task.span)
        before, self._published[here] = self._published.get(here), task.slot
        keys = [("block means", ArrayKey("block_means", task.partition))]
        if task.step is not None and before == task.slot:
            self.counts["published"] += 1  # the gradient is as good as NaN
        elif before is not None:
            keys.append(("published", ArrayKey("y", task.partition, before)))
        for counted, key in keys:
            if key in arena.layout.by_key():
                array = arena.tensor(*key)
                if task.span is not None:
                    blocks = arena.tensor("p", task.partition).numel() / array.numel()
                    array = array[
                        math.floor(task.span.begin / blocks) : math.ceil(task.span.end / blocks)
                    ]
                array.fill_(float("nan"))
                self.counts[counted] += 1


@contextmanager
def synchronous() -> Iterator[None]:
    """Let the whole device come to rest before and after everything that starts a copy."""

    def resting(original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def method(*args: Any, **kwargs: Any) -> Any:
            get_accelerator().synchronize()
            result = original(*args, **kwargs)
            get_accelerator().synchronize()
            return result

        return method

    with ExitStack() as stack:
        for owner, name in (
            (Stream, "take"),
            (Stream, "depart"),
            (Stream, "block_means"),
            (Stream, "complete"),
            (AdamKind, "predict"),
            (PredictiveRule, "_read_results"),
            (SelectiveRule, "to_hand_over"),
        ):
            _patch(stack, owner, name, resting)
        yield


def _patch(
    stack: ExitStack,
    owner: type,
    name: str,
    wrap: Callable[[Callable[..., Any]], Callable[..., Any]],
) -> None:
    stack.enter_context(patch.object(owner, name, wrap(getattr(owner, name))))
