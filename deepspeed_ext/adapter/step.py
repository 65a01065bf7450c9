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

A test records the calls of real steps and compares them with `CALLS`.

If gradients are on the host before the step, DeepSpeed takes the way of its CPU offload: it calls
``complete_grad_norm_calculation_for_cpu_offload`` in place of ``get_grad_norm_direct``, and ``reset_cpu_buffers`` at
the end of the step or of an overflow; neither ``_get_preflattened_grad_partition`` nor, at stage 3, ``zero_grad``.

An exception that breaks off a step, a backward pass or a load, even between two calls, leaves the phase in which it
came. The engine then refuses what would build on a part: after a step everything, after a backward pass everything but
a save, after a load everything but another load.
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
    """What goes on, or was broken off, and how far it has got."""

    BETWEEN = "nothing"
    AWAY = "nothing, and states are on the host"
    BACKWARD = "gradients are computed and reduced; weights and optimizer stay as they are"
    LOADING = "weights, optimizer and counters are written from a checkpoint"
    STEPPING = "the engine steps; its optimizer has not begun, or has ended"
    CHECKING = "the optimizer looks for overflows and computes the norm; nothing is changed yet"
    TAKING = "gradients are handed over and weights are written"


_REMEDY = "build a new engine, and load the last checkpoint"
_BROKEN_OFF = {
    StepPhase.BACKWARD: "the last backward pass, which may have reduced a part of the gradients. Weights and optimizer "
    f"are those of the step before and can be saved. To train on, {_REMEDY}",
    StepPhase.LOADING: "the last load, so weights, optimizer and counters may be of several checkpoints: load one as a "
    "whole",
}
_OF_A_STEP = "the last optimizer step, of which weights, optimizer and scheduler may hold a part: " + _REMEDY


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
        phase: what goes on now. Between calls of the engine: what was broken off, if it is neither BETWEEN nor AWAY.
        receivers: one for each partition, in order.
    """

    def __init__(self, receivers: Sequence[GradientReceiver]) -> None:
        self.phase = StepPhase.BETWEEN
        self.receivers = list(receivers)
        self._factor: float | None = None
        self._is_wrapped = False  # whether a backward pass goes on in `of_backward`
        self._has_loaded: bool | None = None  # whether the load that goes on has begun; None: none goes on
        self._cause = ""

    # -- transitions --------------------------------------------------------------------------------------------------

    @contextmanager
    def of_engine(self) -> Iterator[None]:
        """Wrap DeepSpeed's engine while it steps. May be nested, for a part of the step that is also called alone."""
        if self.phase is not StepPhase.BETWEEN:
            yield
            return
        self._cause, self.phase = "", StepPhase.STEPPING
        with self._noting_cause():
            yield
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

    @contextmanager
    def of_backward(self) -> Iterator[None]:
        """Wrap DeepSpeed's engine in a backward pass; a pass that a user calls on a tensor is not wrapped. An exception
        before `backward_begins` changes nothing."""
        self._is_wrapped = True
        try:
            with self._noting_cause():
                yield
        finally:
            self._is_wrapped = False
        self.backward_ends()

    def backward_begins(self) -> None:
        """Note that gradients may be reduced from now on."""
        if self.phase is StepPhase.BETWEEN:
            self._cause, self.phase = "", StepPhase.BACKWARD

    def backward_ends(self) -> None:
        """Note that all gradients are reduced; the engine may still count."""
        if self.phase is StepPhase.BACKWARD and not self._is_wrapped:
            self.phase = StepPhase.BETWEEN

    @contextmanager
    def of_load(self) -> Iterator[None]:
        """Wrap a load. An exception before `load_begins` changes nothing."""
        self._has_loaded = False
        try:
            yield
            if self._has_loaded:
                self.phase = StepPhase.BETWEEN
        except BaseException as error:
            if self._has_loaded:
                self._note(error)
            raise
        finally:
            self._has_loaded = None

    def load_begins(self) -> None:
        """Note that the load changes weights, optimizer or counters from now on. Outside of a load, do nothing."""
        if self._has_loaded is not None:
            self._cause, self.phase, self._has_loaded = "", StepPhase.LOADING, True

    @contextmanager
    def _noting_cause(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self._note(error)
            raise

    def _note(self, error: BaseException) -> None:
        if isinstance(error, GeneratorExit):  # an exception between two lines of `with` left this context behind
            return
        self._cause = f"{type(error).__name__}{f' ({error})' if str(error) else ''}"

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

    def states_away(self) -> None:
        """Note that states are offloaded."""
        if self.phase is StepPhase.BETWEEN:
            self.phase = StepPhase.AWAY

    def states_back(self) -> None:
        """Note that the offloaded states are on the accelerator again."""
        if self.phase is StepPhase.AWAY:
            self.phase = StepPhase.BETWEEN

    def require_whole(self, *unless: StepPhase) -> None:
        """Refuse to continue after something was broken off.

        Args:
            unless: phases whose breaking off does not matter here.

        Raises:
            StateError: the last step, backward pass or load was broken off.
        """
        if self.phase not in (StepPhase.BETWEEN, StepPhase.AWAY, *unless):
            # Without a cause: the exception came before it could be noted, or this is called inside a step.
            cause = self._cause or "an exception"
            raise StateError(f"{cause} has broken off {_BROKEN_OFF.get(self.phase, _OF_A_STEP)}")
