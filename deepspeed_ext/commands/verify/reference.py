"""Trains plainly: torch's own optimizer over fp32 masters, gradients reduced as torch's DDP does,
nothing else.

It shares no code with ZeRO. DeepSpeed provides only the learning rate schedule and the loss scale,
because the config names DeepSpeed's classes for them.
"""

from __future__ import annotations

import contextlib
import math
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import deepspeed_ext.runtime.first_calls  # noqa: F401
from deepspeed_ext.adapter.upstream import GRADIENT_CLIPPING_DEFAULT, loss_scaler, schedule_class
from deepspeed_ext.commands.verify.config import Plan
from deepspeed_ext.commands.verify.model import data_of, new_model
from deepspeed_ext.config.file import section_of
from deepspeed_ext.runtime.backend import dist

__all__ = ["PlainRun", "PlainTraining", "train_plainly"]

Weights = dict[str, Tensor]
"""fp32, on the host, by the parameter's name."""


@dataclass
class PlainRun:
    """The results of a plain training.

    Attributes:
        losses: of each step, on this rank.
        untrained: losses of the same batches with the initial weights.
        norms: of each step's whole gradient, before clipping.
        skipped: steps whose gradients were not finite.
        initial: masters before the first step.
        masters: masters after each of the last steps, the newest last.
    """

    losses: list[float] = field(default_factory=list)
    untrained: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    skipped: list[int] = field(default_factory=list)
    initial: Weights = field(default_factory=dict)
    masters: deque[Weights] = field(default_factory=deque)

    def add(self, training: PlainTraining, step: int) -> None:
        """Let `training` take a step, and record the results."""
        loss, norm = training.step(step)
        self.losses.append(loss)
        self.norms.append(norm)
        if not math.isfinite(norm):
            self.skipped.append(step)
        self.masters.append(training.weights())


def train_plainly(plan: Plan, device: torch.device, noise: float = 0.0) -> PlainRun:
    """Train as `plan` says, on all ranks together.

    Args:
        noise: every element of a gradient is multiplied by 1 plus a random number of at most this
            size.
    """
    training = PlainTraining(plan, device, noise)
    run = PlainRun(initial=training.weights(), masters=deque(maxlen=1))
    for step in range(plan.steps):
        run.untrained.append(training.untrained_loss(step))
        run.add(training, step)
    return run


class PlainTraining:
    """A model, its masters and torch's optimizer. All ranks step together.

    Args:
        noise: as for `train_plainly`.
    """

    def __init__(self, plan: Plan, device: torch.device, noise: float = 0.0) -> None:
        assert plan.optimizer is not None
        dtype = getattr(torch, plan.dtype)
        self.plan, self.noise, self.device = plan, noise, device
        self.model = new_model(plan.flat_model).to(device, dtype)
        self.start = new_model(plan.flat_model).to(device, dtype)
        self.named = dict(self.model.named_parameters())
        self.params = list(self.named.values())
        self.masters = [param.detach().float().clone() for param in self.params]
        self.sums = [torch.zeros_like(master) for master in self.masters]
        kind, arguments = plan.optimizer
        self.optimizer = getattr(torch.optim, kind)(self.masters, **arguments)
        scheduler = section_of(plan.config, "scheduler")
        self.scheduler: Any = None
        if name := scheduler.get("type"):
            self.scheduler = schedule_class(name)(self.optimizer, **section_of(scheduler, "params"))
        self.scaler = loss_scaler(dtype, section_of(plan.config, "fp16"))
        self.clip = float(plan.config.get("gradient_clipping", GRADIENT_CLIPPING_DEFAULT) or 0.0)
        self.draw = torch.Generator(device=device).manual_seed(1)

    def weights(self) -> Weights:
        """The masters."""
        return {
            name: master.cpu().clone()
            for name, master in zip(self.named, self.masters, strict=True)
        }

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        if self.plan.autocast is None:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, getattr(torch, self.plan.autocast))

    def _data(self, step: int) -> list[tuple[Tensor, Tensor]]:
        data = data_of(step, dist.get_rank(), self.plan.batches)
        return [(tokens.to(self.device), tags.to(self.device)) for tokens, tags in data]

    def untrained_loss(self, step: int) -> float:
        """The loss of a step's batches with the initial weights."""
        data = self._data(step)
        with torch.no_grad(), self._autocast():
            return math.fsum(self.start(*batch).item() for batch in data) / len(data)

    def follow(self, weights: Weights) -> None:
        """Take the next step's gradients at these weights instead of its own."""
        with torch.no_grad():
            for name, param in self.named.items():
                param.copy_(weights[name])

    def step(self, number: int) -> tuple[float, float]:
        """Take optimizer step `number`; return this rank's mean loss and the gradient norm,
        infinite if the step was skipped."""
        losses, data = [], self._data(number)
        for batch in data:
            with self._autocast():
                loss = self.model(*batch)
            losses.append(loss.item())
            (loss / len(data) * self.scaler.loss_scale).backward()
            self._reduce()
        norm = self._take(self.scaler.loss_scale)
        overflow = not math.isfinite(norm)
        self.scaler.update_scale(overflow)
        if self.scheduler is not None and not overflow:
            self.scheduler.step()
        return math.fsum(losses) / len(losses), norm

    def _reduce(self) -> None:
        """Add the mean of all ranks' gradients to the sums, in the dtype that the config
        communicates in."""
        dtype = getattr(torch, self.plan.communication)
        flat = torch.cat(
            [param.grad.flatten().to(dtype) for param in self.params if param.grad is not None]
        )
        flat /= dist.get_world_size()
        dist.all_reduce(flat)
        for total, part in zip(
            self.sums, flat.split([p.numel() for p in self.params]), strict=True
        ):
            total += part.view_as(total)
        for param in self.params:
            param.grad = None

    def _take(self, scale: float) -> float:
        """Step the masters with the sums, and set the weights; return the norm before clipping."""
        grads = [total / scale for total in self.sums]
        for total in self.sums:
            total.zero_()
        if self.noise:
            for grad in grads:
                drawn = torch.rand(
                    grad.shape, generator=self.draw, dtype=grad.dtype, device=self.device
                )
                grad *= 1 + self.noise * (2 * drawn - 1)
        norm = torch.stack([grad.norm() for grad in grads]).norm().item()
        if not math.isfinite(norm):
            return math.inf
        factor = min(1.0, self.clip / (norm + 1e-6)) if self.clip else 1.0
        for master, grad in zip(self.masters, grads, strict=True):
            master.grad = grad * factor
        self.optimizer.step()
        with torch.no_grad():
            for param, master in zip(self.params, self.masters, strict=True):
                param.copy_(master)
        return norm
