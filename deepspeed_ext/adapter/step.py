r"""The protocol of a step: what DeepSpeed calls between `step()` and its return, in order.

======================================= ==================================== ==========================================
stages 1 and 2                          stage 3                              what ours does
======================================= ==================================== ==========================================
``step``                                the same                             BETWEEN -> CHECKING; receivers stand in
                                                                             for the masters
``check_overflow``                      ``check_overflow``, with fp16        left out, unless a rank's norm may leave
                                                                             gradients out
``get_grad_norm_direct``                the same                             norms of gradients, without fp64 copies
``zero_grad``, return to the engine     the same                             on an overflow: the step ends here
\                                       ``zero_grad``                        keeps the reduced gradients
for each partition, in order:
``_get_preflattened_grad_partition``    \                                    CHECKING -> TAKING, if it is the first
``unscale_and_clip_grads``              ``unscale_and_clip_grads``           finds the factor; scales nothing
``_optimizer_step``                     ``_optimizer_step``                  CHECKING -> TAKING, if it is the first;
                                                                             hands the gradient over; after the last:
                                                                             writes all weights
the ranks exchange the weights          persistent parameters are gathered   selective rule: only what has changed
``step`` returns                        the same                             ends the step; TAKING -> BETWEEN
scheduler, ``zero_grad``, counters      the same
======================================= ==================================== ==========================================

A test records the calls of real steps and compares them with `CALLS`.

If gradients are on the host before the step, DeepSpeed takes the way of its CPU offload: it calls
``complete_grad_norm_calculation_for_cpu_offload`` in place of ``get_grad_norm_direct``, and ``reset_cpu_buffers`` at
the end of the step or of an overflow; neither ``_get_preflattened_grad_partition`` nor, at stage 3, ``zero_grad``.

An exception that leaves one of these calls is recorded (`interruption`). The engine then refuses
what would build on a part.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from deepspeed_ext.runtime.backend import get_accelerator

__all__ = ["CALLS", "GradientReceiver", "Step", "StepPhase"]

_OF_A_PARTITION = ("unscale_and_clip_grads", "_optimizer_step")
CALLS = {
    "stages 1 and 2": {
        "before": ("step", "check_overflow", "get_grad_norm_direct"),
        "overflow": ("zero_grad",),
        "partition": ("_get_preflattened_grad_partition", *_OF_A_PARTITION),
        "after": (),
    },
    "stage 3": {
        "before": ("step", "get_grad_norm_direct", "zero_grad"),
        "overflow": ("zero_grad",),
        "partition": _OF_A_PARTITION,
        "after": (),
    },
    "gradients on the host": {
        "before": ("step", "complete_grad_norm_calculation_for_cpu_offload"),
        "overflow": ("zero_grad", "reset_cpu_buffers"),
        "partition": _OF_A_PARTITION,
        "after": ("reset_cpu_buffers",),
    },
}
"""The methods of the optimizer that DeepSpeed calls, by part of the step: before the factor is known; on an overflow,
in place of what follows; for each partition; afterwards. ``get_grad_norm_direct`` is called for each parameter group or
sub-group, and stage 3 with fp16 calls ``check_overflow`` first."""


class StepPhase(enum.Enum):
    """How far the optimizer's step has got."""

    BETWEEN = "no step runs"
    CHECKING = "it looks for overflows and computes the norm; nothing is changed yet"
    TAKING = "gradients are handed over and weights are written"


class GradientReceiver:
    """Stands in for a master while DeepSpeed steps, and receives the gradient that DeepSpeed would give the master.

    Attributes:
        data: the partition of the weights, 1-D [n], in the model's dtype.
        dtype: dtype to which DeepSpeed converts the flat gradient.
        grad: the flat gradient, 1-D [n].
    """

    def __init__(self, data: torch.Tensor, dtype: torch.dtype) -> None:
        self.data = data
        self.dtype = dtype
        self.grad: torch.Tensor | None = None

    def numel(self) -> int:
        """Number of elements of the partition."""
        return self.data.numel()

    def release(self) -> None:
        """Drop the references to weights and gradient."""
        self.data = torch.empty(0, dtype=self.data.dtype, device="cpu")
        self.grad = None


class Step:
    """The state of the current step or, between steps, of the next one.

    Attributes:
        phase: how far it has got.
        receivers: one for each partition, in order.
    """

    def __init__(self, receivers: Sequence[GradientReceiver]) -> None:
        self.phase = StepPhase.BETWEEN
        self.receivers = list(receivers)
        self._factor: float | None = None

    @contextmanager
    def of_optimizer(self) -> Iterator[None]:
        """Wrap DeepSpeed's optimizer while it steps."""
        self.phase = StepPhase.CHECKING
        try:
            yield
        finally:
            self.phase, self._factor = StepPhase.BETWEEN, None
            for receiver in self.receivers:
                receiver.grad = None

    def begin(self) -> bool:
        """Begin to take gradients; return whether this is the first such call in the step."""
        if self.phase is not StepPhase.CHECKING:
            return False
        self.phase = StepPhase.TAKING
        return True

    # -- the factor ---------------------------------------------------------------------------------------------------

    def find_factor(self, unscale_and_clip: Callable[[torch.Tensor], None]) -> None:
        """Find the factor of the step's gradients by letting DeepSpeed unscale and clip a tensor that holds 1. Later
        calls in the same step do nothing.

        Args:
            unscale_and_clip: DeepSpeed's method, applied in place to a 1-element fp32 tensor.
        """
        if self._factor is None:
            one = torch.ones(1, dtype=torch.float32, device=get_accelerator().current_device_name())
            unscale_and_clip(one)
            self._factor = float(one)

    @property
    def factor(self) -> float:
        """The multiplier of the step's gradients; call `find_factor` first."""
        assert self._factor is not None, "DeepSpeed stepped without unscaling"
        return self._factor

    @property
    def takes_gradients(self) -> bool:
        """Whether the optimizer steps, so the reduced gradients are needed."""
        return self.phase in (StepPhase.CHECKING, StepPhase.TAKING)
