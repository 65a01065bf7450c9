"""Holds what both ZenFlow optimizers share about gradients that go to the host during backward (`HostGradients`).

DeepSpeed then treats them as those of its own CPU offload: it neither keeps nor flattens them on the accelerator, and
takes norms that were found during backward.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch

from deepspeed_ext.adapter.grad_norm import known_norm_tensors
from deepspeed_ext.adapter.host_gradients import HostGradients
from deepspeed_ext.adapter.step import Step
from deepspeed_ext.adapter.upstream import ZeROOptimizer
from deepspeed_ext.runtime.backend import get_accelerator
from deepspeed_ext.zenflow.plan.places import Place
from deepspeed_ext.zenflow.step.optimizer import OffloadedAdam

__all__ = ["GradientsOnHost"]


class GradientsOnHost(ZeROOptimizer, ABC):
    """Comes before DeepSpeed's optimizer class among the bases."""

    micro_step_id: int
    zenflow_adam: OffloadedAdam
    dp_process_group: Any
    reduce_bucket_size: int
    contiguous_gradients: bool
    _step: Step
    _host_gradients: HostGradients | None = None
    """Takes the gradients to the host during backward; None: they wait on the accelerator."""

    @abstractmethod
    def _weights(self, index: int) -> torch.Tensor:
        """The weights of a partition, 1-D [n], in the model's dtype."""

    @property
    def _place_of_weights(self) -> Place:
        """Where partitions of the weights are."""
        return Place.ACCELERATOR

    @property
    def _can_take_gradients(self) -> bool:
        """Whether a gradient can go to the host during backward: not if a rank keeps those of other partitions."""
        return True

    @property
    def _flattens_sums(self) -> bool:
        """Whether DeepSpeed copies the gradients of a partition to a flat tensor even if they are sums in another dtype
        than that of the weights."""
        return False

    @property
    @abstractmethod
    def _bucket_bytes(self) -> int:
        """Bytes of the buckets in which DeepSpeed reduces gradients."""

    def _take_gradient(self, number: int, gradient: torch.Tensor) -> None:
        """Start the copy of this rank's part of a reduced gradient of this micro-step to the host; `number` is the
        parameter's id."""
        assert self._host_gradients is not None, "called only if gradients are on the host"
        completes = self.is_gradient_accumulation_boundary()
        self._host_gradients.take(number, gradient, adds=self.micro_step_id > 0, completes=completes)

    def _place_gradients(self) -> None:
        """Let the receivers show the gradients of the coming step, which are on the host."""
        for index, receiver in enumerate(self._step.receivers):
            receiver.grad = self.zenflow_adam.coming_slot(index)

    def _finish_gradients(self) -> None:
        """Complete gradients that are on the host, before a step."""
        if self._host_gradients is not None:
            self._place_gradients()
            self._host_gradients.finish()

    def reset_cpu_buffers(self) -> None:
        super().reset_cpu_buffers()
        if self._host_gradients is not None:
            with self.zenflow_adam.link.keeping():
                self._host_gradients.forget()

    def _norm_of_known(self, gradients: HostGradients, numbers: Sequence[int], params: Sequence[Any]) -> Any:
        """DeepSpeed's norm of gradients on the accelerator, to the bit, from what was found during backward; `numbers`
        are the ids of `params`."""
        device = get_accelerator().current_device_name()
        exact = torch.float64 if get_accelerator().is_fp64_supported() else torch.float32
        # If this rank has kept an error, NaN makes every rank skip the step as an overflow.
        norms = [torch.full((1,), math.nan, dtype=exact, device=device) for _ in numbers]
        if not self.zenflow_adam.link.failed:
            with self.zenflow_adam.link.keeping():
                unused = torch.zeros(1, dtype=exact, device=device)
                known = [gradients.norms.get(number, unused).to(device).view(1) for number in numbers]
                norms = known_norm_tensors(known, params)
        return super().get_grad_norm_direct(norms, params)
