"""Plain training: torch's own optimizer over fp32 masters, gradients reduced as torch's DDP does, nothing else.

It shares no code with ZeRO. DeepSpeed gives only the learning rate schedule and the loss scale, which the config names
by DeepSpeed's classes.
"""

from __future__ import annotations

import contextlib
import math
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import deepspeed_ext._first_calls  # noqa: F401 (it is compared with DeepSpeed's, in other threads)
from deepspeed_ext._config_file import section_of
from deepspeed_ext._upstream import dist, loss_scaler, schedule_class
from deepspeed_ext.verify.config import Plan
from deepspeed_ext.verify.model import data_of, new_model

__all__ = ["PlainRun", "Weights", "train_plainly"]

Weights = dict[str, Tensor]
"""fp32, on the host, by the parameter's name."""


@dataclass
class PlainRun:
    """What a plain training leaves.

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


def train_plainly(plan: Plan, device: torch.device, keep: int = 1, noise: float = 0.0) -> PlainRun:
    """Train as `plan` says, on all ranks together.

    Args:
        plan: the check.
        device: of this rank.
        keep: number of steps, the last ones, whose masters are returned.
        noise: every element of a gradient is multiplied by 1 and a random number up to this.
    """
    training = _Plain(plan, device, noise)
    run = PlainRun(initial=training.weights(), masters=deque(maxlen=keep))
    rank = dist.get_rank()
    for step in range(plan.steps):
        data = [(tokens.to(device), tags.to(device)) for tokens, tags in data_of(step, rank, plan.batches)]
        run.untrained.append(training.untrained_loss(data))
        loss, norm = training.step(data)
        run.losses.append(loss)
        run.norms.append(norm)
        if not math.isfinite(norm):
            run.skipped.append(step)
        run.masters.append(training.weights())
    return run


class _Plain:
    """A model, its masters and torch's optimizer."""

    def __init__(self, plan: Plan, device: torch.device, noise: float) -> None:
        assert plan.optimizer is not None
        dtype = getattr(torch, plan.dtype)
        self.plan, self.noise, self.device = plan, noise, device
        self.model = new_model().to(device, dtype)
        self.start = new_model().to(device, dtype)
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
        self.clip = float(plan.config.get("gradient_clipping") or 0.0)
        self.draw = torch.Generator(device=device).manual_seed(1)

    def weights(self) -> Weights:
        return {name: master.cpu().clone() for name, master in zip(self.named, self.masters, strict=True)}

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        if self.plan.autocast is None:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, getattr(torch, self.plan.autocast))

    def untrained_loss(self, data: list[tuple[Tensor, Tensor]]) -> float:
        with torch.no_grad(), self._autocast():
            return math.fsum(self.start(*batch).item() for batch in data) / len(data)

    def step(self, data: list[tuple[Tensor, Tensor]]) -> tuple[float, float]:
        """One optimizer step. Returns this rank's mean loss, and the norm of the gradient; infinite: skipped."""
        losses = []
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
        """Add the mean of all ranks' gradients to the sums, in the dtype that the config communicates in."""
        dtype = getattr(torch, self.plan.communication)
        flat = torch.cat([param.grad.flatten().to(dtype) for param in self.params if param.grad is not None])
        flat /= dist.get_world_size()
        dist.all_reduce(flat)
        for total, part in zip(self.sums, flat.split([p.numel() for p in self.params]), strict=True):
            total += part.view_as(total)
        for param in self.params:
            param.grad = None

    def _take(self, scale: float) -> float:
        """Step the masters with the sums, and set the weights; returns the norm before clipping."""
        grads = [total / scale for total in self.sums]
        for total in self.sums:
            total.zero_()
        if self.noise:
            for grad in grads:
                grad *= 1 + self.noise * (2 * torch.rand(grad.shape, generator=self.draw, device=self.device) - 1)
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
