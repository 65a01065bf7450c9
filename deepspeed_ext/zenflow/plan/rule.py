"""Defines the settings of update rules, and the bytes that they take besides the arena."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar

from deepspeed_ext.config import ZenFlowConfig
from deepspeed_ext.errors import ConfigError
from deepspeed_ext.zenflow.plan.places import Source
from deepspeed_ext.zenflow.worker.kernel.adam_pass import ADAM_STATE
from deepspeed_ext.zenflow.worker.kernel.passes import (
    ACCELERATOR_CHUNK_NUMEL,
    DTYPE_BYTES,
    StateLayout,
    chunk_of,
)

FLOAT_BYTES = DTYPE_BYTES["float32"]
_SIGN_BYTES = 1

_INTERVAL = 4
_LEAST_STEPS, _LEAST_INTERVALS = 16, 4
"""Between two selections, unless the config says otherwise."""
_STATE_BYTES = 3 * FLOAT_BYTES
"""Bytes per element of a hot block: p, m and v in fp32."""
_NUMBER_BYTES = 8


@dataclass(frozen=True)
class RuleBytes:
    """Bytes that a rule takes for a partition, where its gradients are.

    Attributes:
        kept: besides the weights, by kind.
        saved: of each tensor in a checkpoint, besides the arena.
        step: maximum temporaries while the weights are computed.
        crossing: in a step, of weights that go to the accelerator, if they are computed elsewhere,
            besides the worker's; and of state on the host that goes there, if they are not.
    """

    kept: dict[str, int] = field(default_factory=dict)
    saved: tuple[int, ...] = ()
    step: int = 0
    crossing: tuple[int, int] = (0, 0)


@dataclass(frozen=True)
class RuleSettings:
    """Settings of the predictive rule and of the exact one, which never overlaps, as plain values;
    see the fields of the same names in `ZenFlowConfig`.

    Attributes:
        name: in configs and checkpoints.
        limits: why the rule runs only Adam with fp32 moments, on data-parallel ranks, and with no
            share on the accelerator; empty: it has none of these limits.
        steps_beside_worker: whether the rule steps blocks where the gradients are, and so predicts
            nothing.
        warm_up_steps: synchronous steps at the start; None: the schedule chooses.
        layout: the optimizer's state.
        warning: what the user should know of the settings; None: nothing.
        prediction_error_factor: 0: no guard.
    """

    name: ClassVar[str] = "predictive"
    limits: ClassVar[str] = ""
    steps_beside_worker: ClassVar[bool] = False

    overlapped: bool
    warm_up_steps: int | None
    block_size: int = field(kw_only=True)
    layout: StateLayout = field(default=ADAM_STATE, kw_only=True)
    warning: str | None = field(default=None, kw_only=True)
    prediction_error_factor: float = field(default=0.0, kw_only=True)

    def nbytes(
        self, numel: int, item: int = 0, gradient: int = 0, *, in_place: bool = False
    ) -> RuleBytes:
        """The bytes that the rule takes for a partition.

        Kept: 1 / d_b of each block. With signs, the signs and means of m.

        Temporaries by torch operations are fp32 arrays of one chunk: for 16-bit weights three of
        `predict`, to which y comes in parts, for others one. With signs two, and a byte
        for each sign. A kernel needs none, but whether it can run is not known before the run.

        Args:
            item, gradient: bytes of an element of the weights and of y, and of a gradient.
            in_place: whether y is in a landing buffer, so it is not copied to the accelerator in
                parts.
        """
        if not self.overlapped:
            return RuleBytes()
        signs = self.layout.with_signs
        entries = -(-numel // self.block_size) * self.per_block_width
        kept = {"signs and means" if signs else "derived denominators": FLOAT_BYTES * entries}
        chunk = min(numel, chunk_of(ACCELERATOR_CHUNK_NUMEL, self.block_size))
        y, factor = chunk * (0 if in_place else item), FLOAT_BYTES * -(-chunk // self.block_size)
        floats = 2 if signs else 3 if item < FLOAT_BYTES else 1
        others = max(chunk * _SIGN_BYTES, y) if signs else max(y, factor)
        return RuleBytes(kept, tuple(kept.values()), floats * FLOAT_BYTES * chunk + others)

    @property
    def estimates(self) -> bool:
        """Whether a step may compute weights from y and an estimate."""
        return self.overlapped and not self.steps_beside_worker

    def slots(self, source: Source) -> int:
        """Slots of a partition's gradients, which they take in turn."""
        return slots_at(source) if self.overlapped else 1

    @property
    def per_block_width(self) -> int:
        """See `StateLayout`."""
        return self.layout.per_block_width(self.block_size)

    @property
    def per_block_bytes(self) -> int:
        """Its bytes for one block."""
        return self.per_block_width * DTYPE_BYTES[self.layout.per_block[1]]

    def head_bytes(self, numel: int) -> int:
        """Bytes of accelerator memory of `numel` elements, whole blocks, that step there: p, the
        moments in their own dtype, and a byte for each scale of codes."""
        scales = len(self.layout.scales) * (numel // self.block_size)
        return sum(DTYPE_BYTES[dtype] for _, dtype in self.layout.arrays) * numel + scales


def slots_at(source: Source) -> int:
    """Number of slots for gradients that overlapped steps need.

    Note: [the slot of y]
    y replaces the gradient that went into it, in its slot. The slot may be reused once the step has
    read y, so not if the next gradient arrives before that.
    """
    return 1 if source is Source.COPY else 2


@dataclass(frozen=True)
class SelectiveSettings(RuleSettings):
    """Settings of the selective rule, which collects the gradients of an interval by itself and
    hands over their mean."""

    name = "selective"
    steps_beside_worker = True  # hot blocks
    limits: ClassVar[str] = (
        "hot blocks step on the accelerator in place of a share, with fp32 moments of Adam, and "
        "each data-parallel group chooses its own; the predictive rule has none of these limits"
    )

    interval: int
    """Optimizer steps whose mean gradient makes one step of the cold blocks."""
    topk_ratio: float
    select_every_steps: int
    """Optimizer steps between two selections, a multiple of `interval`; 0: select only once."""

    def nbytes(
        self, numel: int, item: int = 0, gradient: int = 0, *, in_place: bool = False
    ) -> RuleBytes:
        """Kept: p, m, v and the numbers of the hot blocks, and the mean of the interval's
        gradients. A step takes the gradient and weights of the hot blocks."""
        blocks = math.ceil(self.topk_ratio * (numel // self.block_size))
        hot, numbers = blocks * self.block_size, blocks * _NUMBER_BYTES
        mean = numel * gradient if self.interval > 1 else 0
        kept = {"hot blocks": numbers + hot * _STATE_BYTES, "mean gradient": mean}
        step = self.layout.step_bytes(hot, self.block_size) + hot * (item + gradient)
        crossing = numbers + hot * item, FLOAT_BYTES * hot
        return RuleBytes(kept, (numbers, mean), step, crossing)


_UNKNOWN_EPOCH = (
    'zenflow.select_strategy = "epoch": the length of an epoch is known only if '
    "deepspeed.initialize gets training_data, so hot blocks are selected only once. Set "
    'select_strategy to "step", and select_interval'
)


def _select_steps(config: ZenFlowConfig, steps_per_epoch: int | None) -> int | None:
    """Optimizer steps between two selections as the config gives them; 0: one selection; None: not
    given."""
    given, strategy = config.select_interval, config.select_strategy
    if strategy == "step" and given is None:
        raise ConfigError(
            'zero_optimization.zenflow.select_strategy = "step" needs select_interval, the number '
            'of optimizer steps between two selections: set it, or set select_strategy to "auto"'
        )
    return given if strategy != "epoch" else (given or 1) * (steps_per_epoch or 0)


def _in_intervals(steps: int | None, interval: int) -> int:
    """`steps` rounded up to whole intervals."""
    if steps is None:
        steps = max(_LEAST_STEPS, _LEAST_INTERVALS * interval)
    if 0 < steps < interval:
        raise ConfigError(
            f"zero_optimization.zenflow selects hot blocks every {steps} steps, which is less "
            f"than update_interval = {interval}: raise select_interval or lower update_interval"
        )
    return math.ceil(steps / interval) * interval


def settings_of(
    config: ZenFlowConfig, layout: StateLayout = ADAM_STATE, steps_per_epoch: int | None = None
) -> RuleSettings:
    """The settings of the config's rule.

    Args:
        steps_per_epoch: optimizer steps per epoch; None: unknown.

    Raises:
        ConfigError: the section contradicts itself.
    """
    size, overlapped = config.block_size, config.overlapped
    if config.rule != "selective":
        return RuleSettings(
            overlapped,
            config.warm_up_steps,
            block_size=size,
            layout=layout,
            prediction_error_factor=config.prediction_error_factor,
        )
    steps = _select_steps(config, steps_per_epoch)
    interval = config.update_interval or min(_INTERVAL, steps or _INTERVAL)
    by_epoch = config.select_strategy == "epoch"
    return SelectiveSettings(
        overlapped,
        max(1, config.full_warm_up_rounds),
        interval,
        config.topk_ratio,
        _in_intervals(steps, interval),
        block_size=size,
        layout=layout,
        warning=_UNKNOWN_EPOCH if by_epoch and not steps_per_epoch else None,
    )


def limits_of(config: ZenFlowConfig) -> str:
    """See `RuleSettings.limits`."""
    return SelectiveSettings.limits if config.rule == "selective" else ""
