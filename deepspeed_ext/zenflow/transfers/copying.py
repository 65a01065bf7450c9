"""What copies between accelerator and host need: streams of their own, and waits for them; landing
buffers on the accelerator, so that they run beside the next step; and page-locked host memory.

Page-locked memory that the accelerator's runtime did not allocate is never unmapped while it is
locked.
"""

from __future__ import annotations

import contextlib
import os
import resource
import time
import weakref
from collections.abc import Collection, Sequence
from functools import partial
from typing import Any

import torch

from deepspeed_ext.runtime import memory as allocation
from deepspeed_ext.runtime.backend import (
    SHARED_MEMORY,
    can_register_host_memory,
    get_accelerator,
    has_host_memory,
    page_lock_alignment,
)
from deepspeed_ext.runtime.log import one_line, warn_once
from deepspeed_ext.runtime.ranks import RankGroup
from deepspeed_ext.zenflow.plan.places import Copies
from deepspeed_ext.zenflow.plan.plan import ZenFlowPlan

_SHARE_ASLEEP = 0.05
_LONGEST_SLEEP_SECONDS = 0.01


# Note: [Streams of copies]
# torch has 32 streams of each priority for a process and device, and gives them again in turn.
# Communicators and DeepSpeed take theirs from those of default priority, and each engine takes
# more. A copy on a communicator's stream would wait for its collectives, which wait for other
# ranks. Copies to and from the host ignore priorities, so theirs is a pool that others leave alone.


def new_stream() -> Any:
    """A stream on the current device for copies, of high priority if the accelerator has
    priorities; see Note: [Streams of copies]."""
    try:
        return get_accelerator().Stream(priority=-1)
    except TypeError:
        return get_accelerator().Stream()


def recorded(stream: Any) -> Any:
    """An event after everything that was launched on `stream` so far, on which a thread sleeps
    instead of spinning, if the accelerator has such events."""
    try:
        event = get_accelerator().Event(blocking=True)
    except TypeError:
        event = get_accelerator().Event()
    event.record(stream)
    return event


def have_ended(streams: Collection[Any], seconds: float) -> bool:
    """Wait for everything launched on `streams` so far, with a limit: a stream may hold a
    collective that a peer never launches.

    Returns:
        Whether all of it is done; False also if the accelerator has failed.
    """
    begin, ends = time.monotonic(), []
    try:
        for stream in streams:
            ends.append(recorded(stream))
        while not all(end.query() for end in ends):
            if (passed := time.monotonic() - begin) > seconds:
                return False
            time.sleep(min(_SHARE_ASLEEP * passed, _LONGEST_SLEEP_SECONDS))
    except RuntimeError:
        return False
    return True


# -- landing buffers -------------------------------------------------------------------------------


class LandingBuffer:
    """Device memory that holds the gradient of one partition of n elements, and then its results.

    A step that has computed its weights copies its gradient here. It goes to the host during the
    next forward, chunk by chunk, and y of a chunk comes back during backward.

    Note: [y follows its gradient]
    The gradient is at the end and y at the start. If their sizes are equal, y of a chunk overwrites
    its own gradient; otherwise it also overwrites those of earlier chunks, so chunks must travel in
    the order of their elements. No event orders the two copies: the worker has answered with y of a
    chunk, so its gradient has arrived on the host.

    Attributes:
        gradient, published: 1-D [n].
        means: the rule's per-block array, one row per block if a block has several elements; None:
            it has none.
    """

    gradient: torch.Tensor
    published: torch.Tensor
    means: torch.Tensor | None

    def __init__(self, plan: ZenFlowPlan, numel: int) -> None:
        self._plan, self._numel = plan, numel
        self.allocate()

    def allocate(self) -> None:
        """Allocate the memory, with undefined contents."""
        plan, numel = self._plan, self._numel
        device = torch.device(get_accelerator().current_device_name())
        gradient = getattr(torch, plan.gradient_dtype)
        published = getattr(torch, plan.caller.weights_dtype)
        nbytes = numel * max(gradient.itemsize, published.itemsize)
        buffer = allocation.accelerator_empty(nbytes, torch.uint8, device)
        self.gradient = buffer[buffer.numel() - numel * gradient.itemsize :].view(gradient)
        self.published, self.means = buffer[: numel * published.itemsize].view(published), None
        if plan.lifts_per_block:
            blocks, width = -(-numel // plan.rule.block_size), plan.rule.per_block_width
            size = (blocks,) if width == 1 else (blocks, width)
            self.means = torch.empty(
                size, dtype=getattr(torch, plan.rule.layout.per_block[1]), device=device
            )

    def release(self) -> None:
        """Free the memory. Until `allocate`, the buffer has neither gradient nor results."""
        del self.gradient, self.published, self.means


def landing_buffers(plan: ZenFlowPlan, ranks: RankGroup) -> list[LandingBuffer] | None:
    """Allocate the plan's landing buffers; None on every rank if a rank has no memory for them. A
    collective if the plan has any."""
    if plan.copies is not Copies.BESIDE_STEP:
        return []
    return allocation.try_on_all_ranks(
        "zenflow.landing_buffers",
        lambda: [LandingBuffer(plan, each.on_host) for each in plan.partitions],
        ranks,
    )


# -- page-locked memory ----------------------------------------------------------------------------

_left: list[Any] = []
"""Objects kept in memory until the process ends."""


class PageLocks:
    """Host memory that this object has page-locked.

    If memory were unmapped while page-locked, later mappings at its address would count as
    page-locked. So memory that is not passed to `unlock` stays locked and mapped until the process
    ends.
    """

    def __init__(self) -> None:
        self._locked: dict[int, torch.Tensor] = {}  # by the address of the first page
        self._owner_pid = os.getpid()
        weakref.finalize(self, _leave, self._locked).atexit = False

    def lock(self, tensors: Sequence[torch.Tensor]) -> None:
        """Page-lock existing host tensors, so that their copies run in parallel with computation.
        Idempotent.

        If the system refuses (``ulimit -l``), or the accelerator cannot do it, a warning is logged:
        copies then go through pageable memory, slower and synchronously.

        Args:
            tensors: must not share a page with other locked memory.
        """
        accelerator = get_accelerator()
        if accelerator.is_synchronized_device():
            return
        alignment = page_lock_alignment(accelerator)
        for tensor in tensors:
            begin = tensor.data_ptr() // alignment * alignment
            if tensor.numel() == 0 or begin in self._locked:
                continue
            nbytes = tensor.data_ptr() + tensor.nbytes - begin
            if (error := _refusal(begin, nbytes)) is not None:
                soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
                limit = None if soft == resource.RLIM_INFINITY else soft
                name = accelerator.device_name() if not can_register_host_memory() else None
                remedy = remedy_for_refused(error, limit, has_host_memory(), without=name)
                warn_once(
                    f"{tensor.nbytes:,} bytes of the optimizer's memory could not be page-locked: "
                    f"copies take 3 to 6 times as long (an H200's), and steps wait. {remedy}"
                )
                return
            self._locked[begin] = tensor

    def unlock(self) -> None:
        """Undo `lock`. No copy to or from the memory may be running. Idempotent."""
        if os.getpid() != self._owner_pid:  # a forked process must not use the accelerator
            return
        for begin in list(self._locked):
            unlock = partial(get_accelerator().unregister_host_memory, begin)
            refused = _error_of(unlock) is not None
            tensor = self._locked.pop(begin)
            if refused:
                _left.append(tensor)

    def leave(self, *others: object) -> None:
        """Keep everything locked, and `others` alive, until the process ends, because copies may
        still run."""
        _leave(self._locked)
        self._locked.clear()
        _left.extend(others)


def _leave(locked: dict[int, torch.Tensor]) -> None:
    _left.extend(locked.values())


def remedy_for_refused(
    error: str, limit: int | None, is_host_memory: bool, *, without: str | None = None
) -> str:
    """Say why memory could not be page-locked, and what to change. A pure function.

    Args:
        error: the accelerator runtime's error.
        limit: bytes that this process may lock; None: unlimited.
        is_host_memory: whether the accelerator's memory is the host's.
        without: name of DeepSpeed's accelerator, if its class cannot lock memory at all.
    """
    if without is not None:
        return f"DeepSpeed's accelerator {without!r} has no register_host_memory"
    if is_host_memory:
        return (
            f"The accelerator's memory is the host's ({error}), "
            f"so offload frees nothing: {SHARED_MEMORY}"
        )
    if limit is not None:
        return (
            f"Raise the limit on locked memory, {limit:,} bytes (ulimit -l, --ulimit memlock=-1). "
            f"The runtime said: {error}"
        )
    return (
        f"The limit on locked memory is not the cause; this driver or runtime refuses it: {error}"
    )


def _refusal(address: int, nbytes: int) -> str | None:
    """Page-lock memory; return the error, or None."""
    registered: list[Any] = []
    error = _error_of(
        lambda: registered.append(bool(get_accelerator().register_host_memory(address, nbytes)))
    )
    return error if error is not None or any(registered) else "it was not registered"


def _error_of(call: Any) -> str | None:
    """The error that a call of the accelerator's runtime raises, or None; clears it in the runtime.
    A runtime without such a call raises an `AttributeError`.

    The runtime would report the error of a refused call again at the next check of a kernel launch,
    wherever that is. torch has no function to clear it, but launching a kernel through torch does.
    """
    try:
        call()
    except (AttributeError, NotImplementedError, RuntimeError) as error:
        with contextlib.suppress(RuntimeError):
            torch.ones(1, dtype=torch.float32, device=get_accelerator().current_device_name())
        return one_line(error)
    return None
