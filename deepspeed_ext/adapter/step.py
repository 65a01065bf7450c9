r"""The protocol of a step: what DeepSpeed calls between `step()` and its return, in order.

================================== ================================== ============================
stages 1 and 2                     stage 3                            what ours does
================================== ================================== ============================
``step``                           the same                           BETWEEN -> CHECKING;
                                                                      receivers stand in for the
                                                                      masters
``check_overflow``                 ``check_overflow``, with fp16      left out, unless a rank's
                                                                      norm may leave gradients out
``get_grad_norm_direct``           the same                           norms of gradients, without
                                                                      fp64 copies
``zero_grad``, return to the       the same                           on an overflow: the step
engine                                                                ends here
\                                  ``zero_grad``                      keeps the reduced gradients
for each partition, in order:
``_get_preflattened_grad_          \                                  CHECKING -> TAKING, if it is
partition``                                                           the first
``unscale_and_clip_grads``         ``unscale_and_clip_grads``         finds the factor; scales
                                                                      nothing
``_optimizer_step``                ``_optimizer_step``                CHECKING -> TAKING, if it is
                                                                      the first; hands the
                                                                      gradient over; after the
                                                                      last: writes all weights
the ranks exchange the weights     persistent parameters are gathered \
``step`` returns                   the same                           ends the step;
                                                                      TAKING -> BETWEEN
scheduler, ``zero_grad``, counters the same
================================== ================================== ============================

A test records the calls of real steps and compares them with ``step_calls.json``: the optimizer
methods that DeepSpeed calls, by part of the step. ``get_grad_norm_direct`` is called for each
parameter group or sub-group, and stage 3 with fp16 calls ``check_overflow`` first.

If gradients are on the host before the step, DeepSpeed follows its CPU-offload path: it calls
``complete_grad_norm_calculation_for_cpu_offload`` in place of ``get_grad_norm_direct``, and
``reset_cpu_buffers`` at the end of the step or of an overflow; neither
``_get_preflattened_grad_partition`` nor, at stage 3, ``zero_grad``.

The ZeRO subclasses forward these calls to a `StepDriver`. An exception that leaves one of them is
recorded (`readiness`); the engine then rejects calls that need complete state.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from deepspeed_ext.adapter.gradients import HostGradients, known_norm_tensors, norm_tensors
from deepspeed_ext.adapter.upstream import norm_dtype
from deepspeed_ext.adapter.zero_partitions import ZeroPartitions
from deepspeed_ext.runtime.backend import get_accelerator
from deepspeed_ext.zenflow.step.optimizer import HostOptimizer


class AutocastScale:
    """Runs DeepSpeed's ``GradScaler`` on a gradient of one element, as a step of its own optimizer
    would.

    DeepSpeed unscales and checks each partition's gradient separately, so the scale may grow
    between two partitions.

    Args:
        scaler: the ``GradScaler`` of DeepSpeed's optimizer.
    """

    def __init__(self, scaler: Any) -> None:
        self._scaler = scaler
        device = get_accelerator().current_device_name()
        self._one = torch.zeros(1, dtype=torch.float32, device=device, requires_grad=True)
        self._steps = torch.optim.SGD([self._one], lr=0.0)

    def factor(self) -> float:
        """The multiplier that unscales the next partition's gradient; notes a step without
        overflow."""
        return self._stepped(1.0)

    def overflowed(self) -> None:
        """Lower the scale after an overflow. DeepSpeed 0.19.8 never does: it skips the step before
        the ``GradScaler`` sees the gradient, so every later step would overflow too."""
        self._stepped(math.inf)

    def _stepped(self, gradient: float) -> float:
        grad = torch.full_like(self._one, gradient)
        self._one.grad = grad
        self._scaler.unscale_(self._steps)
        self._scaler.step(self._steps)
        self._scaler.update()
        return float(grad)

    def state_dict(self) -> dict[str, Any]:
        """The scale and the steps since it last changed; DeepSpeed's checkpoints leave them out."""
        return self._scaler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._scaler.load_state_dict(state)


class StepPhase(enum.Enum):
    BETWEEN = "no step runs"
    CHECKING = "it checks for overflows and computes the norm; nothing has changed yet"
    TAKING = "gradients are handed over and weights are written"


class GradientReceiver:
    """Stands in for a master while DeepSpeed steps, and receives its gradient.

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
        return self.data.numel()

    def release(self) -> None:
        self.data = torch.empty(0, dtype=self.data.dtype, device="cpu")
        self.grad = None


class StepDriver:
    """Runs DeepSpeed's `step` unchanged, with a `GradientReceiver` in place of each master, while
    the host optimizer takes the gradients and writes the weights.

    Args:
        scale: the loss scale of ``torch_autocast``; None: DeepSpeed's own, if any.

    Attributes:
        phase: of the current step.
        receivers: one for each partition, in order.
        gradients: takes gradients to the host during backward; None: they wait on the accelerator.
    """

    def __init__(
        self, host: HostOptimizer, partitions: ZeroPartitions, scale: AutocastScale | None
    ) -> None:
        self._host = host
        self._partitions = partitions
        self._scale = scale
        dtype = getattr(torch, host.decided.gradient_dtype)
        wholes = host.state.wholes
        self.phase = StepPhase.BETWEEN
        self.receivers = [GradientReceiver(each.master.data, dtype) for each in wholes]
        self.gradients: HostGradients | None = None
        self._factor: float | None = None  # of the step's gradients

    @property
    def takes_gradients(self) -> bool:
        """Whether the optimizer is stepping, so that the reduced gradients are needed."""
        return self.phase is not StepPhase.BETWEEN

    def run(self, super_call: Callable[[], None], overflows: Callable[[], bool]) -> None:
        """Step by DeepSpeed's `super_call`, which has skipped the step if it `overflows`."""
        link = self._host.link
        with link.deferring_errors():
            if self.gradients is not None:
                self.place_gradients()
                self.gradients.finish()
        self.phase = StepPhase.CHECKING
        try:
            with link.deferring_errors():
                for index, receiver in enumerate(self.receivers):
                    receiver.data = self._partitions.weights(index)
            # also after an error: unlike masters, they accept gradients on the device
            with self._partitions.stand_in(self.receivers):
                super_call()
                if not overflows():
                    self._host.end_step()
                    return
                with link.deferring_errors():
                    if self._scale is not None:
                        self._scale.overflowed()
                link.raise_deferred()
        finally:
            self.phase, self._factor = StepPhase.BETWEEN, None
            for receiver in self.receivers:
                receiver.grad = None

    # Note: [a step begins late]
    # Beginning a step may wait for the worker, and a step that has begun is counted. DeepSpeed
    # first reduces norms, and returns if a gradient is not finite. So a step begins at the first
    # call that needs a free slot or hands a gradient over: an overflow begins none.

    def begin(self) -> None:
        """Begin the step if it has not begun; see Note: [a step begins late]."""
        if self.phase is StepPhase.CHECKING:
            self.phase = StepPhase.TAKING
            self._host.begin_step()

    def find_factor(self, unscale_and_clip: Callable[[torch.Tensor], None]) -> None:
        """Find the factor of the step's gradients, which the worker and the estimate apply: let
        DeepSpeed unscale and clip, in place, a 1-element fp32 tensor with the number 1. Later calls
        in the same step do nothing."""
        if self._factor is not None:
            return
        with self._host.link.deferring_errors():
            one = torch.ones(1, dtype=torch.float32, device=get_accelerator().current_device_name())
            unscale_and_clip(one)
            self._factor = float(one)

    def take(self, index: int) -> None:
        """Hand over the gradient of a partition; after the last one, write all weights."""
        self.begin()
        grad_scale = 1.0  # unused: without a factor, an error is kept
        with self._host.link.deferring_errors():
            assert self._factor is not None, "DeepSpeed stepped without unscaling"
            grad_scale = self._factor
            if self._scale is not None:
                grad_scale *= self._scale.factor()
        gradient: Any = self.receivers[index].grad
        self._host.step_partition(index, gradient, grad_scale)
        if index == len(self.receivers) - 1:
            self._host.finish_weights(starts_copies=not self._partitions.waits_after_weights)

    # -- norms -------------------------------------------------------------------------------------

    def norms(self, gradients: Sequence[torch.Tensor], params: Sequence[Any]) -> list[torch.Tensor]:
        """Small tensors with the norms of `gradients`, so that DeepSpeed makes no fp64 copies; see
        `norm_tensors`."""
        norms: list[torch.Tensor] | None = None
        with self._host.link.deferring_errors():
            norms = norm_tensors(gradients, params)
        # NaN makes every rank skip the step as an overflow; see Note: [an error of one rank].
        nan = partial(torch.full, (1,), math.nan, dtype=torch.float32)
        return norms or [nan(device=gradient.device) for gradient in gradients]

    def known_norms(self, numbers: Sequence[int], params: Sequence[Any]) -> list[torch.Tensor]:
        """Bitwise what `norms` returns, for gradients that went to the host during backward, of
        `params` with the ids `numbers`."""
        assert self.gradients is not None, "called only if gradients are on the host"
        link, found, exact = self._host.link, list[torch.Tensor](), norm_dtype()
        device = get_accelerator().current_device_name()
        if not link.failed:
            with link.deferring_errors():
                unused = torch.zeros(1, dtype=exact, device=device)
                norms = [self.gradients.norms.get(number, unused) for number in numbers]
                found = known_norm_tensors([norm.to(device).view(1) for norm in norms], params)
        # NaN, if this rank has kept an error; see Note: [an error of one rank].
        nan = partial(torch.full, (1,), math.nan, dtype=exact, device=device)
        return found or [nan() for _ in numbers]

    # -- gradients on the host ---------------------------------------------------------------------

    def is_finite(self) -> bool:
        """Whether this rank has kept no error, and its part of every gradient is finite."""
        failed = self._host.link.failed
        return not failed and all(bool(torch.isfinite(slot).all()) for slot in self.slots())

    def place_gradients(self) -> None:
        """Set the receivers' gradients to those of the next step, which are on the host."""
        for index, receiver in enumerate(self.receivers):
            receiver.grad = self._host.coming_slot(index)

    def slots(self) -> list[torch.Tensor]:
        """Each partition's gradient of the next step, on the host."""
        return list(map(self._host.coming_slot, range(len(self.receivers))))
