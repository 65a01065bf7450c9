"""Computes what DeepSpeed 0.19.8's own ZenFlow holds and how long its step takes, overlapped. Pure
functions.

Read in its source. It is ZeRO-Offload with more arrays: a snapshot of the weights, a second
gradient, and two pairs of moments that alternate. It overwrites the gradient accumulation with its
interval, so an optimizer step has that many micro-steps, and ZeRO-Offload sums their gradients on
the host.
"""

from __future__ import annotations

from deepspeed_ext.commands.memory.setup import FLOAT_BYTES, Model, Ranks, Setup, Stage
from deepspeed_ext.commands.memory.traffic import Machine, StepTime

__all__ = ["INTERVAL", "TOPK", "device_extra", "host_extra", "setup", "step"]

INTERVAL = 4
TOPK = 0.1
"""Share of the columns that step on the GPU, as in DeepSpeed's examples."""

_EXTRA = 4 * FLOAT_BYTES
"""Host bytes per parameter besides ZeRO-Offload's: snapshot, second gradient, second m and second
v, all fp32."""
_ON_DEVICE = 3
"""m, v and the gradient of the selected columns, in the weights' dtype."""


def setup(stage: Stage) -> Setup:
    """ZeRO-Offload as ZenFlow sets it up; what ZenFlow adds is `host_extra` and `device_extra`."""
    gathers = stage == 3  # as ours: a trainer saves the model
    return Setup(
        stage=stage, offload=True, pins=True, accumulation=INTERVAL, gathers_on_save=gathers
    )


def host_extra(model: Model, ranks: Ranks, stage: Stage) -> int:
    """Bytes of a rank on its host besides those of `setup`."""
    return _EXTRA * setup(stage).partition_numel(model, ranks)


def device_extra(model: Model, ranks: Ranks, stage: Stage) -> int:
    """Bytes on a GPU besides those of `setup`. At stages 1 and 2 every rank steps the selected
    columns of the whole model."""
    base = setup(stage)
    numel = base.partition_numel(model, ranks) if base.partitions_weights else model.params
    return round(TOPK * _ON_DEVICE * model.itemsize * numel)


def step(model: Model, ranks: Ranks, stage: Stage, machine: Machine) -> StepTime:
    """Seconds of an optimizer step, which has `INTERVAL` micro-steps.

    Every micro-step but the last sums its 16-bit gradient on the host, for which the sum goes up
    and comes down again. The last one sends fp32. Then the trainer itself unscales the gradient on
    the host, and copies the snapshot, which is fp32, to the GPU: both are exposed. The process
    reads the gradient, updates p, m and v, and writes the snapshot.
    """
    numel = setup(stage).partition_numel(model, ranks)
    down = FLOAT_BYTES + (INTERVAL - 1) * model.itemsize
    up = (INTERVAL - 1) * model.itemsize
    unscaling, adam, snapshot = 2 * FLOAT_BYTES, 7 * FLOAT_BYTES, FLOAT_BYTES
    host = machine.host / ranks.per_host
    transfer = max(down, up) * numel / machine.link
    passes = (adam + snapshot + down + up + FLOAT_BYTES) * numel / host
    exposed = unscaling * numel / host + FLOAT_BYTES * numel / machine.link
    return StepTime(transfer, passes, exposed, max(transfer, passes))
