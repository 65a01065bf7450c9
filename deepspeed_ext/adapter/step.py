r"""The protocol of a step: what DeepSpeed calls between `step()` and its return, in order.

======================================= ==================================== ==========================================
stages 1 and 2                          stage 3                              what ours does
======================================= ==================================== ==========================================
``engine.step``                         the same                             BETWEEN -> STEPPING
``step``                                the same                             STEPPING -> CHECKING; receivers stand in
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
``step`` returns                        the same                             ends the step; TAKING -> STEPPING
scheduler, ``zero_grad``, counters      the same
``engine.step`` returns                 the same                             STEPPING -> BETWEEN
======================================= ==================================== ==========================================

A test records the calls of real steps and compares them with `CALLS`. If an exception interrupts a step at any
point, even between two calls, weights, optimizer, gradients, scheduler, loss scale and counters may be updated in part.
The phase is then BROKEN_OFF, and the engine refuses to continue.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from deepspeed_ext.errors import StateError
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
}
"""The methods of the optimizer that DeepSpeed calls, by part of the step: before the factor is known; on an overflow,
in place of what follows; for each partition; afterwards. ``get_grad_norm_direct`` is called for each parameter group or
sub-group, and stage 3 with fp16 calls ``check_overflow`` first."""


class StepPhase(enum.Enum):
    """How far a step has got."""

    BETWEEN = "no step goes on"
    AWAY = "no step goes on, and states are on the host"
    STEPPING = "the engine steps; its optimizer has not begun, or has ended"
    CHECKING = "the optimizer looks for overflows and computes the norm; nothing is changed yet"
    TAKING = "gradients are handed over and weights are written"
    BROKEN_OFF = "an exception has left a step"


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
        self._cause = ""

    # -- transitions --------------------------------------------------------------------------------------------------

    @contextmanager
    def of_engine(self) -> Iterator[None]:
        """Wrap DeepSpeed's engine while it steps. May be nested, for a part of the step that is also called alone."""
        if self.phase is not StepPhase.BETWEEN:
            yield
            return
        self._cause, self.phase = "an exception", StepPhase.STEPPING
        try:
            yield
        except BaseException as error:
            self._cause = f"{type(error).__name__}{f' ({error})' if str(error) else ''}"
            self.phase = StepPhase.BROKEN_OFF
            raise
        self.phase = StepPhase.BETWEEN

    @contextmanager
    def of_optimizer(self) -> Iterator[None]:
        """Wrap DeepSpeed's optimizer while it steps, inside an engine's step or without one."""
        with self.of_engine():
            self.phase = StepPhase.CHECKING
            try:
                yield
            finally:
                self._factor = None
                for receiver in self.receivers:
                    receiver.grad = None
            self.phase = StepPhase.STEPPING

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

    # -- between steps ------------------------------------------------------------------------------------------------

    @property
    def takes_gradients(self) -> bool:
        """Whether the optimizer steps, so the reduced gradients are needed."""
        return self.phase in (StepPhase.CHECKING, StepPhase.TAKING)

    def states_back(self) -> None:
        """Note that the offloaded states are on the accelerator again."""
        if self.phase is StepPhase.AWAY:
            self.phase = StepPhase.BETWEEN

    def require_whole(self) -> None:
        """Refuse to continue after an interrupted step.

        Raises:
            StateError: the last step was interrupted.
        """
        # STEPPING or later: an exception came before `of_engine` could note it, or this is called inside a step.
        if self.phase not in (StepPhase.BETWEEN, StepPhase.AWAY):
            raise StateError(
                f"{self._cause} has broken off the last optimizer step, of which weights, optimizer and scheduler "
                "may hold a part: build a new engine, and load the last checkpoint"
            )
