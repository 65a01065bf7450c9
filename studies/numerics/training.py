"""Train one row in this process, on one thread; a row that runs out of time is continued by the
next run."""

from __future__ import annotations

import math
import os
import time
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from studies.numerics.rows import Row, rate_of
from studies.numerics.rule import Gradient, Hyper, Rule, Start, kernel
from studies.numerics.rules import RULES, SPLITTING
from studies.numerics.settings import GROWTH_STEPS, INITIAL_LOSS_SCALE, SETTINGS, Setting
from studies.numerics.task import Batch
from studies.numerics.tasks import TASKS
from tests.perf import report

SECONDS_EVERY = 50
NORM_EPSILON = 1e-6
"""DeepSpeed adds it to the norm before it clips."""


class Flat:
    """A model whose parameters and gradients are views of two flat tensors, in the order of its
    parameters."""

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        self.model = model.to(dtype)
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        self.values = torch.cat([p.detach().flatten() for p in parameters])
        self._grads = torch.zeros_like(self.values)
        begin = 0
        for p in parameters:
            end = begin + p.numel()
            p.data, p.grad = self.values[begin:end].view_as(p), self._grads[begin:end].view_as(p)
            begin = end

    def gradient(self, batch: Batch, factor: float) -> tuple[float, torch.Tensor]:
        """The mean loss of a batch, and the gradient of `factor` times it, until the next call."""
        self._grads.zero_()
        loss = self.model(*batch)
        (loss * factor).backward()
        return loss.item(), self._grads

    @torch.no_grad()
    def loss(self, batches: list[Batch]) -> float:
        """The mean loss of batches."""
        return sum(self.model(*batch).item() for batch in batches) / len(batches)


@dataclass
class LossScale:
    """The factor of the loss: 1, or under fp16 one that halves on overflow and grows after a while
    without."""

    dynamic: bool
    value: float = 1.0
    good: int = 0
    overflows: int = 0

    @classmethod
    def of(cls, setting: Setting) -> LossScale:
        """As the dtype of the weights needs it."""
        dynamic = setting.weights == "float16"
        return cls(dynamic, INITIAL_LOSS_SCALE if dynamic else 1.0)

    def passes(self, norm: float) -> bool:
        """Take note of a gradient's norm; False: its step is skipped."""
        if not self.dynamic:
            return True
        if not math.isfinite(norm):
            self.value, self.good, self.overflows = self.value / 2, 0, self.overflows + 1
            return False
        self.good += 1
        if self.good % GROWTH_STEPS == 0:
            self.value *= 2
        return True


@dataclass
class Progress:
    """What a row that was interrupted continues from."""

    rule: Rule
    loss_scale: LossScale
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    spent: float = 0.0
    diverged: bool = False


def bounds_of(numel: int, ranks: int) -> tuple[int, ...]:
    """Where each rank's partition begins, and the end: equal parts, padded at the end as ZeRO pads
    them."""
    size = -(-numel // (2 * ranks)) * 2
    return tuple(min(rank * size, numel) for rank in range(ranks + 1))


def clip_factor(norm: float, loss_scale: float, limit: float) -> float:
    """c: undoes the loss scale and clips, as DeepSpeed computes it. `norm` is of the scaled
    gradient."""
    excess = (norm / loss_scale + NORM_EPSILON) / limit if limit else 0.0
    return 1.0 / (loss_scale * max(1.0, excess))


class Training:
    """One row while it is trained."""

    def __init__(self, row: Row, progress: Progress | None = None) -> None:
        self.row, self.task, self.setting = row, TASKS[row.task], SETTINGS[row.setting]
        self.rate = rate_of(row)
        if row.rule in SPLITTING and self.setting.ranks < 2:
            raise ValueError(
                f"{row.rule} splits the batch: choose a setting with ranks, not {row.setting}"
            )
        self.dtype = getattr(torch, self.setting.weights)
        torch.manual_seed(row.seed)
        self.flat = Flat(
            self.task.model(), self.dtype if self.setting.compute == "weights" else torch.float32
        )
        self.progress = progress or Progress(
            RULES[row.rule](self._start()), LossScale.of(self.setting)
        )

    def _start(self) -> Start:
        masters = self.flat.values.float()
        hyper = Hyper(self.setting.beta2, self.task.weight_decay)
        return Start(masters, hyper, self.dtype, bounds_of(masters.numel(), self.setting.ranks))

    @property
    def rule(self) -> Rule:
        return self.progress.rule

    @property
    def is_done(self) -> bool:
        return self.progress.diverged or len(self.progress.losses) == self.setting.steps

    def step(self) -> float:
        """One optimizer step; returns the loss."""
        step, setting, scale = len(self.progress.losses) + 1, self.setting, self.progress.loss_scale
        examples = max(setting.ranks, int(self.task.batch * setting.batch))
        batch, factor = self.task.batch_of(self.row.seed, step, setting.steps, examples)
        losses, shares = [], []
        for rank, share in enumerate(
            zip(*(tensor.chunk(setting.ranks) for tensor in batch), strict=True)
        ):
            if rank == 0 or self.row.rule in SPLITTING:
                self.flat.values.copy_(self.rule.weights(rank))
            loss, grad = self.flat.gradient(share, factor * scale.value)
            losses.append(loss)
            shares.append(grad.to(self.dtype, copy=True))
        reduced = _reduced(shares)
        norm = reduced.float().norm().item()
        if scale.passes(norm):
            c = clip_factor(norm, scale.value, setting.clip) if math.isfinite(norm) else 1.0
            self.rule.step(Gradient(reduced, tuple(shares), c, setting.lr(step, self.rate)))
        return sum(losses) / len(losses)

    def run(self, deadline: float = math.inf) -> None:
        """Train until done, or until `deadline` of `time.monotonic`.

        Seconds are of the CPU, so what else runs on the machine does not count.
        """
        begin, progress = time.process_time(), self.progress
        before = progress.spent
        while not self.is_done and time.monotonic() < deadline:
            loss = self.step()
            progress.spent = before + time.process_time() - begin
            if not math.isfinite(loss):
                progress.diverged = True
                return
            progress.losses.append(loss)
            if len(progress.losses) % SECONDS_EVERY == 0:
                progress.seconds.append(round(progress.spent, 2))

    def result(self) -> dict[str, Any]:
        """What the file of the row holds."""
        progress, batches = self.progress, self.task.held_out()
        torch.manual_seed(self.row.seed)
        start = Flat(self.task.model(), torch.float32).loss(batches)
        self.flat.values.copy_(self.rule.masters().to(self.dtype))
        held_out = self.flat.loss(batches)
        return {
            "rate": self.rate,
            "parameters": self.flat.values.numel(),
            "diverged": progress.diverged,
            "losses": [round(loss, 5) for loss in progress.losses],
            "seconds": progress.seconds,
            "clock": "CPU",
            "held_out_before": round(start, 5),
            "held_out": round(held_out, 5) if math.isfinite(held_out) else None,
            "overflows": progress.loss_scale.overflows,
            "kernel": kernel().name,
            "made": report.provenance()
            | {"threads": torch.get_num_threads(), "load": round(os.getloadavg()[0], 1)},
        }


def _reduced(shares: list[torch.Tensor]) -> torch.Tensor:
    """The mean of the ranks' gradients, divided first and summed in their dtype, as DeepSpeed and
    gloo do it."""
    if len(shares) == 1:
        return shares[0]
    total = shares[0] / len(shares)
    for share in shares[1:]:
        total += share / len(shares)
    return total
