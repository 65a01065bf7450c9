"""What all update rules share: their interface, and Adam over flat fp32 masters by the package's
own pass."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache

import torch

from deepspeed_ext.zenflow.worker.kernel import load_kernel
from deepspeed_ext.zenflow.worker.kernel.adam_pass import ADAM_STATE, AdamStep, Publish
from deepspeed_ext.zenflow.worker.kernel.native import library_path
from deepspeed_ext.zenflow.worker.kernel.passes import Array, Kernel, Pass, dtype_name

PLAIN_BLOCK = 256
"""Elements per block where a rule does not use the mean of v."""


@dataclass(frozen=True)
class Hyper:
    """AdamW's hyperparameters, without the learning rate."""

    beta2: float
    weight_decay: float
    beta1: float = 0.9
    eps: float = 1e-8

    def step(self, number: int, lr: float, grad_scale: float) -> AdamStep:
        """The constants of update `number`, from 1."""
        return AdamStep(
            lr, self.beta1, self.beta2, self.eps, self.weight_decay, True, number, grad_scale
        )


@dataclass(frozen=True)
class Gradient:
    """The gradient of one optimizer step; its flat tensors belong to the receiver.

    Attributes:
        reduced: mean over the batch, 1-D [n], dtype of the weights.
        shares: mean over each rank's share of the batch, likewise.
        scale: c, the factor that unscales and clips `reduced`.
        lr: the learning rate of this step.
    """

    reduced: torch.Tensor
    shares: tuple[torch.Tensor, ...]
    scale: float
    lr: float


@dataclass(frozen=True)
class Start:
    """What a rule begins with.

    Attributes:
        masters: 1-D fp32 [n].
        dtype: of the weights.
        bounds: where each rank's partition begins, and n.
    """

    masters: torch.Tensor
    hyper: Hyper
    dtype: torch.dtype
    bounds: tuple[int, ...]

    def part(self, rank: int) -> Start:
        """The partition of one rank alone."""
        begin, end = self.bounds[rank], self.bounds[rank + 1]
        return Start(self.masters[begin:end], self.hyper, self.dtype, (0, end - begin))


@cache
def kernel() -> Kernel:
    """The package's kernel, on one thread."""
    return load_kernel(library_path(), threads=1)


def _array(tensor: torch.Tensor) -> Array:
    assert tensor.is_contiguous()
    return Array(tensor.data_ptr(), str(tensor.dtype).removeprefix("torch."), tensor.numel())


@dataclass
class Host:
    """p, m and v of one partition, and what the newest pass published.

    Attributes:
        p, m, v: 1-D [n]; p is fp32.
        scales: of the codes of m and of v, if they have 8 bits.
        published: y of the newest pass, 1-D [n], dtype of the weights.
        means: mean of v over each block.
    """

    p: torch.Tensor
    m: torch.Tensor
    v: torch.Tensor
    published: torch.Tensor
    means: torch.Tensor
    block_size: int = field(default=PLAIN_BLOCK)
    scales: tuple[torch.Tensor, ...] = ()

    @classmethod
    def of(
        cls, start: Start, block_size: int = PLAIN_BLOCK, moments: torch.dtype = torch.float32
    ) -> Host:
        """The state before the first step; `moments` is the dtype of m and v."""
        p = start.masters.clone()
        means = torch.zeros(-(-p.numel() // block_size), dtype=torch.float32)
        is_coded = moments is torch.int8
        m, v = (
            torch.zeros_like(p, dtype=each)
            for each in (moments, torch.uint8 if is_coded else moments)
        )
        scales = tuple(torch.zeros_like(means, dtype=torch.uint8) for _ in range(2 * is_coded))
        return cls(p, m, v, p.to(start.dtype, copy=True), means, block_size, scales)

    def run(
        self, grads: Sequence[torch.Tensor], steps: Sequence[AdamStep], publish: Publish
    ) -> None:
        """Passes of the package: an exact update for each gradient, then y and the block
        means."""
        layout = replace(ADAM_STATE, moment_dtype=dtype_name(self.m.dtype))
        state = tuple(map(_array, (self.p, self.m, self.v, *self.scales)))
        y, means = _array(self.published), _array(self.means)
        for number, (grad, step) in enumerate(zip(grads, steps, strict=True), start=1):
            exact = Publish.exact(step.bias_correction2_sqrt, step.eps)
            of_step = publish if number == len(steps) else exact
            kernel().run(
                Pass(layout, state, y, self.block_size, _array(grad), means), of_step, step
            )
        if not steps:
            kernel().run(Pass(layout, state, y, self.block_size, per_block=means), publish)

    def step(self, grad: torch.Tensor, step: AdamStep) -> None:
        """One exact update; publishes p."""
        self.run((grad,), (step,), Publish.exact(step.bias_correction2_sqrt, step.eps))

    def after(self, grad: torch.Tensor, step: AdamStep) -> torch.Tensor:
        """The weights after an exact update that is not kept."""
        trial = copy.deepcopy(self)
        trial.step(grad, step)
        return trial.published


class Rule(ABC):
    """Decides on which weights each forward pass runs.

    Attributes:
        splits: whether the ranks have different weights, so that the rule needs at least two.
    """

    splits = False

    def __init__(self, start: Start) -> None:
        self.hyper = start.hyper
        self.updates = 0

    def _next(self, gradient: Gradient) -> AdamStep:
        self.updates += 1
        return self.hyper.step(self.updates, gradient.lr, gradient.scale)

    @abstractmethod
    def step(self, gradient: Gradient) -> None:
        """Take the gradient of an optimizer step that did not overflow."""

    @abstractmethod
    def weights(self, rank: int = 0) -> torch.Tensor:
        """The weights for the next forward pass of a rank, 1-D [n], dtype of the weights."""

    @abstractmethod
    def masters(self) -> torch.Tensor:
        """p, which a checkpoint would hold, 1-D fp32 [n]."""


class AdamW(Rule):
    """Every update before the next forward pass: what the others are compared with; `moments` is
    their dtype, and `block_size` that of the blocks with one scale."""

    def __init__(
        self, start: Start, moments: torch.dtype = torch.float32, block_size: int = PLAIN_BLOCK
    ) -> None:
        super().__init__(start)
        self.host = Host.of(start, block_size, moments)

    def step(self, gradient: Gradient) -> None:
        self.host.step(gradient.reduced, self._next(gradient))

    def weights(self, rank: int = 0) -> torch.Tensor:
        return self.host.published

    def masters(self) -> torch.Tensor:
        return self.host.p


class NAdam(Rule):
    """torch's NAdam with decoupled decay: AdamW that looks ahead along the momentum. Nothing is
    delayed.

    The package has no NAdam, so this is torch's optimizer, in fp32, with its default momentum
    decay.
    """

    def __init__(self, start: Start) -> None:
        super().__init__(start)
        self.p = torch.nn.Parameter(start.masters.clone())
        hyper, self.dtype = start.hyper, start.dtype
        self.optimizer = torch.optim.NAdam(
            [self.p],
            betas=(hyper.beta1, hyper.beta2),
            eps=hyper.eps,
            weight_decay=hyper.weight_decay,
            decoupled_weight_decay=True,
        )

    def step(self, gradient: Gradient) -> None:
        self.p.grad = gradient.reduced.float() * gradient.scale
        self.optimizer.param_groups[0]["lr"] = gradient.lr
        self.optimizer.step()

    def weights(self, rank: int = 0) -> torch.Tensor:
        return self.masters().to(self.dtype)

    def masters(self) -> torch.Tensor:
        return self.p.detach()
