"""Defines what ZenFlow needs from an optimizer.

Everything that depends on the user's optimizer is behind `OptimizerKind`: its state, the constants
of an update, the worker's pass, the estimate of an update in flight, and the step of what stays on
the accelerator. A new one is a subclass, listed in `zenflow.optimizers`, with the contract of its
pass in `zenflow.worker.kernel`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from deepspeed_ext.config import ZenFlowConfig
from deepspeed_ext.errors import ConfigError
from deepspeed_ext.zenflow.kernels import launch
from deepspeed_ext.zenflow.plan.plan import ZenFlowPlan
from deepspeed_ext.zenflow.worker.kernel.passes import StateLayout

_REHEARSED_NUMEL = 1 << 16
"""Elements of the arrays on which kernels are compiled."""


class OptimizerKind(ABC):
    """The user's optimizer, as ZenFlow runs it.

    `step` makes the constants that other methods take. y and "the per-block array" are as in
    `deepspeed_ext.zenflow`.

    Args:
        optimizer: holds hyperparameters and, for checkpoints, the state; it never updates a weight.
        config: the section; None: the defaults.

    Raises:
        ConfigError: it has a setting that the worker does not support.
    """

    layout: StateLayout

    def __init__(
        self, optimizer: torch.optim.Optimizer, config: ZenFlowConfig | None = None
    ) -> None:
        self.optimizer = optimizer
        if config is not None:
            self.layout = config.state_of(self.layout)

    @classmethod
    @abstractmethod
    def serves(cls, optimizer: torch.optim.Optimizer) -> bool:
        """Whether this class runs `optimizer`."""

    # -- hyperparameters ---------------------------------------------------------------------------

    def require_steppable(
        self, *, predicts: bool, groups: Sequence[Mapping[str, Any]] | None = None
    ) -> None:
        """Check the hyperparameters, which a script may have changed, or those of `groups` that a
        load would bring, for steps with or without prediction.

        Raises:
            ConfigError: a parameter group has a setting with which the worker cannot step.
        """
        for index, group in enumerate(self.optimizer.param_groups if groups is None else groups):
            place = f"parameter group {index} of {type(self.optimizer).__name__}"
            self._require_group(group, place, predicts=predicts)

    def _require_group(self, group: Mapping[str, Any], place: str, *, predicts: bool) -> None:
        try:
            constants = self.constants(group, 1, 1.0)
        except (TypeError, ValueError, KeyError, ArithmeticError, RuntimeError) as error:
            raise ConfigError(
                f"{place} cannot be stepped with: a setting such as "
                f"lr or betas is not a number, or missing ({type(error).__name__}: {error}). "
                "Put it back"
            ) from error
        for name, value in vars(constants).items():
            if not math.isfinite(value):
                raise ConfigError(f"{place} has {name} = {value}, expected a finite number")

    def step(self, group: int, number: int, grad_scale: float) -> Any:
        """`constants` of the parameter group with this index."""
        return self.constants(self.optimizer.param_groups[group], number, grad_scale)

    @abstractmethod
    def constants(self, group: Mapping[str, Any], number: int, grad_scale: float) -> Any:
        """The constants of update `number`, from 1, whose gradient is multiplied by `grad_scale`: a
        frozen dataclass, `Passes.step_type`."""

    @abstractmethod
    def step_value(self, updates: int) -> torch.Tensor | int:
        """The update count as the optimizer stores it."""

    # -- the worker's pass -------------------------------------------------------------------------

    @abstractmethod
    def exact(self, last: Any) -> Any:
        """How to publish p itself after the update `last`."""

    @abstractmethod
    def ahead(self, last: Any) -> Any:
        """How to publish y, from which the next step predicts; `last` is the newest update."""

    def publish(
        self, publish: Any, state: Sequence[torch.Tensor], block_size: int, published: torch.Tensor
    ) -> torch.Tensor:
        """Publish a part of a partition in this process, as the worker does: from p and the
        moments, `state`, to `published`, all 1-D [n] on the host. Return its per-block array,
        1-D."""
        entries = -(-published.numel() // block_size) * self.layout.per_block_width(block_size)
        dtype = getattr(torch, self.layout.per_block[1])
        found = torch.empty(entries, dtype=dtype, device="cpu")
        self.layout.passes.publish(publish, state, block_size, published, found)
        return found

    # -- the estimate ------------------------------------------------------------------------------

    def known(self, last: Any, per_block: torch.Tensor) -> torch.Tensor:
        """What the estimate after the update `last` needs, 1-D, `StateLayout.per_block_width`
        numbers for each block; by default the per-block array.

        Args:
            per_block: the per-block array, 1-D, on the device of the gradients; may be kept.
        """
        return per_block

    @abstractmethod
    def predict(
        self,
        known: torch.Tensor,
        weights: torch.Tensor,
        published: torch.Tensor,
        grad: torch.Tensor,
        step: Any,
        block_size: int,
    ) -> None:
        """Write the weights, from y and the estimated effect of the gradient.

        Args:
            known: from `known`, of the blocks of these elements.
            weights: written in place; 1-D [n], any float dtype, any device.
            published: y, likewise.
            grad: 1-D [n], any float dtype.
            step: the gradient's constants.
        """

    # -- the share on the accelerator --------------------------------------------------------------

    def step_rows(
        self, state: Sequence[torch.Tensor], grad: torch.Tensor, weights: torch.Tensor, step: Any
    ) -> None:
        """Take one exact step of whole blocks, in place, and round p to the weights.

        Args:
            state: p, fp32, and the moments in their own dtypes, [k, block_size], one row per block;
                then the scales of codes, [k].
            grad, weights: [k, block_size], any float dtype, on their device.
        """
        raise NotImplementedError

    def prepare_kernels(
        self, plan: ZenFlowPlan, weights: Sequence[torch.Tensor], *, warns: bool
    ) -> None:
        """Compile the kernels that steps will launch; see `launch.prepare`. Gradients and results
        are at least as aligned as `weights`, those of each partition."""
        device, block_size, layout = weights[0].device, plan.rule.block_size, self.layout
        step, names = self.step(0, 1, 1.0), (plan.caller.weights_dtype, plan.gradient_dtype)
        of_weights, gradient = (getattr(torch, name) for name in names)
        blocks = max(1, _REHEARSED_NUMEL // block_size)

        def zeros(
            dtype: torch.dtype, first: int = 0, numel: int = blocks * block_size
        ) -> torch.Tensor:
            return torch.zeros(first + numel, dtype=dtype, device=device)[first:]

        def estimate(first: int) -> None:
            w, y, g = (zeros(dtype, first) for dtype in (of_weights, of_weights, gradient))
            width, dtype = layout.per_block_width(block_size), getattr(torch, layout.per_block[1])
            known = self.known(step, zeros(dtype, 0, blocks * width))
            self.predict(known, w, y, g, step, block_size)

        def step_rows(first: int) -> None:
            state = [zeros(getattr(torch, dtype)).view(blocks, -1) for _, dtype in layout.arrays]
            state += [zeros(torch.uint8, 0, blocks) for _ in layout.scales]
            g, w = (zeros(dtype, first).view(blocks, -1) for dtype in (gradient, of_weights))
            self.step_rows(state, g, w, step)

        firsts = {0 if launch.is_aligned(block_size, [part]) else 1 for part in weights}
        calls: list[Callable[[], None]] = []
        if plan.head_bytes or (plan.computes_there and plan.rule.steps_beside_worker):
            calls += [partial(step_rows, first) for first in firsts]
        if plan.computes_there and plan.rule.estimates:
            calls += [partial(estimate, first) for first in firsts]
        launch.prepare(device, block_size, calls, warns=warns)
