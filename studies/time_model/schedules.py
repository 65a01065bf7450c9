"""Predicts a published number from a model of the schedule that its system follows. Pure functions.

- *package*: ZeRO-Offload, from the package's own model of time
  (`deepspeed_ext.commands.memory.traffic`).
- *zenflow*: DeepSpeed's ZenFlow, from `upstream`, as the mean of the micro-steps of an interval.
- *behind backward*: down, AdamW and up run chunk by chunk beside backward; what does not fit there
  follows it.
- *serial*: down, AdamW and up follow backward, one after the other.
- *pipelined*: the same three follow backward, all at once.

As in the package's model, the first and the last chunk of a pipeline are not counted, nor are
launches, nor the step of a GPU's own optimizer, which a time without offload contains.
"""

from __future__ import annotations

from dataclasses import replace

from deepspeed_ext.commands.memory.setup import Setup, Stage
from deepspeed_ext.commands.memory.traffic import Machine, StepTime, step_time
from deepspeed_ext.config import ZenFlowConfig
from studies.time_model import upstream
from studies.time_model.inputs import Inputs, Row

__all__ = ["base_of", "implied_host", "ours", "predicted"]

STAGE: Stage = 2
_FLOPS_PER_TOKEN = 6
_FASTEST = 1e15
"""Bytes per second of a host that bounds nothing."""
OURS = Setup(stage=3, zenflow=ZenFlowConfig(update_interval=1, hide_transfers=True))


def base_of(row: Row, machine: Machine) -> float:
    """Seconds of the step without offload: as published, otherwise from its tokens."""
    return (
        row.base
        if row.base is not None
        else _FLOPS_PER_TOKEN * row.params * row.tokens / machine.flops
    )


def predicted(row: Row, inputs: Inputs, machine: Machine | None = None) -> float:
    """The prediction for what the row publishes.

    Args:
        row: the published row; of its number nothing is used.
        inputs: systems, machines and rules.
        machine: speeds in place of those of the row's machine.
    """
    machine = inputs.machines[row.machine] if machine is None else machine
    if row.quantity == "pass":
        return _alone(row, inputs, machine)
    if row.quantity == "exposed":
        return _offload(row, machine).exposed
    seconds = _step(row, inputs, machine)
    if row.quantity == "TFLOPS":
        return _FLOPS_PER_TOKEN * row.params * row.tokens / seconds / 1e12
    if row.quantity == "times ZeRO-Offload":
        return _step(replace(row, system="ZeRO-Offload"), inputs, machine) / seconds
    return seconds


def ours(row: Row, machine: Machine) -> float:
    """Seconds of the row's step with this package at interval 1 and hidden transfers."""
    time = step_time(row.model, row.ranks, OURS, machine)
    return max(base_of(row, machine), time.beside) + time.exposed


def implied_host(row: Row, inputs: Inputs) -> float | None:
    """The speed of the host's memory at which the prediction would be what was published; None:
    there is none.

    It explains a residual. No prediction of a published number uses it.
    """
    machine = inputs.machines[row.machine]

    def at(host: float) -> float:
        return predicted(row, inputs, replace(machine, host=host))

    slow, fast = 1e7, _FASTEST
    falls = at(slow) > at(fast)  # TFLOPS rise with the host's speed
    if not min(at(slow), at(fast)) < row.published < max(at(slow), at(fast)):
        return None
    for _ in range(100):
        middle = (slow * fast) ** 0.5
        if (at(middle) > row.published) == falls:
            slow = middle
        else:
            fast = middle
    return fast


def _alone(row: Row, inputs: Inputs, machine: Machine) -> float:
    """Seconds of the pass without its transfers."""
    system = inputs.systems[row.system]
    nbytes = system.passed - system.down - system.up
    return nbytes * row.params * row.share * row.per_host / row.gpus / machine.host


def _offload(row: Row, machine: Machine) -> StepTime:
    stage: Stage = 3 if row.weights_on_host else STAGE
    setup = Setup(stage=stage, offload=True, pins=True, offload_param=row.weights_on_host)
    return step_time(row.model, row.ranks, setup, machine)


def _step(row: Row, inputs: Inputs, machine: Machine) -> float:
    """Seconds of a step."""
    base = base_of(row, machine)
    forward = base * inputs.forward_share[row.recompute]
    system = inputs.systems[row.system]
    if system.schedule == "package":
        offload = _offload(row, machine)
        return forward + max(base - forward, offload.beside) + offload.exposed
    if system.schedule == "zenflow":
        time = upstream.step(row.model, row.ranks, STAGE, machine)
        return (max(upstream.INTERVAL * base, time.beside) + time.exposed) / upstream.INTERVAL
    numel = row.params * row.share / row.gpus
    down, up = system.down * numel / machine.link, system.up * numel / machine.link
    host = system.passed * numel * row.per_host / machine.host
    if system.schedule == "serial":
        return base + down + host + up
    if system.schedule == "pipelined":
        return base + max(down, host, up)
    return forward + max(base - forward, down, host, up)
