"""Answers whether a model fits a machine, for each way to train it, and what each way costs. Pure functions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from deepspeed_ext.commands.memory.parts import Capacity, MemoryPlan, Place
from deepspeed_ext.commands.memory.plan import plan_memory, settled_on
from deepspeed_ext.commands.memory.setup import Model, Ranks, Setup, Stage
from deepspeed_ext.commands.memory.traffic import Machine, StepTime, step_time
from deepspeed_ext.config import ZenFlowConfig

__all__ = ["Fit", "config_of", "fits", "suggested", "ways"]

STAGES: tuple[Stage, ...] = (2, 3)
INTERVAL = 4
"""Of the selective rule, as published."""
ROOM_FOR_ACTIVATIONS = 0.2
"""Share of the accelerator that a suggestion leaves free; if none does, the one that leaves most is suggested."""

_SECTIONS: dict[str, dict[str, Any]] = {
    "exact": {"update_interval": 1, "hide_transfers": True},
    "exact, copies in the step": {"update_interval": 1, "hide_transfers": False, "gradients_on_host": False},
    "exact, gradients on host": {"update_interval": 1, "gradients_on_host": True},
    "interval 2": {"update_interval": 2, "hide_transfers": True},
    "bf16 moments": {"update_interval": 1, "hide_transfers": True, "state_dtype": "bfloat16"},
    "selective": {"topk_ratio": 0.1, "update_interval": INTERVAL, "overlap_step": True, "hide_transfers": True},
}


@dataclass(frozen=True)
class Fit:
    """One way to train on one machine.

    Attributes:
        name: the way, without its stage.
        plan: its memory.
        time: its optimizer step.
        tokens: tokens per GPU and optimizer step from which nothing of the step is exposed; None: some always is.
        left: bytes that remain at the peak, by place, before activations; empty: the machine is not known.
    """

    name: str
    plan: MemoryPlan
    time: StepTime
    tokens: int | None
    left: dict[Place, int]

    @property
    def short(self) -> list[str]:
        """The places where memory is missing."""
        return [place.value for place, nbytes in self.left.items() if nbytes < 0]


def ways(base: Setup | None = None) -> Iterator[tuple[str, Setup]]:
    """Each way to train, at stages 2 and 3, by name: plain ZeRO, ZeRO-Offload, and ZenFlow with each option."""
    for stage in STAGES:
        at_stage = replace(base or Setup(), stage=stage, offload=False, zenflow=None)
        yield "ZeRO", at_stage
        offload = replace(at_stage, offload=True, pins=True)
        yield "ZeRO-Offload", offload
        for name, section in _SECTIONS.items():
            yield f"ZenFlow {name}", replace(at_stage, zenflow=ZenFlowConfig(**section))
        exact = replace(at_stage, zenflow=ZenFlowConfig(**_SECTIONS["exact"]))
        yield "ZenFlow half on the GPU", replace(exact, host_share=0.5, pins=True)
        if at_stage.partitions_weights:
            yield "ZeRO-Offload, weights on host", replace(offload, offload_param=True)
            yield "ZenFlow weights on host", replace(exact, offload_param=True, pins=True)
            rounded = replace(at_stage, zenflow=ZenFlowConfig(**_SECTIONS["bf16 moments"]))
            yield "ZenFlow bf16, weights on host", replace(rounded, offload_param=True, pins=True)


def fits(model: Model, ranks: Ranks, capacity: Capacity, machine: Machine, active: int | None = None) -> list[Fit]:
    """Every way on this machine.

    Args:
        ranks: GPUs, and how many share a host.
        capacity: memory of a GPU and of a host, as far as it is known.
        active: parameters that a token uses; None: all.
    """
    found = []
    for name, setup in ways():
        setup = settled_on(capacity, model, ranks, setup)
        plan, time = plan_memory(model, ranks, setup), step_time(model, ranks, setup, machine)
        tokens = None if time.exposed else time.tokens(active or model.params, machine)
        found.append(Fit(name, plan, time, tokens, capacity.left(plan)))
    return found


def suggested(found: Sequence[Fit]) -> Fit | None:
    """The first way that fits and leaves room for activations, in this order: plain ZeRO, exact with everything hidden,
    exact with copies in the step, the others in their order; stage 2 before 3. None: no way fits, or the machine is
    not known."""
    names = [*_SECTIONS, "half on the GPU", "weights on host", "bf16, weights on host"]
    order = ["ZeRO", *(f"ZenFlow {name}" for name in names), "ZeRO-Offload", "ZeRO-Offload, weights on host"]
    fitting = [fit for fit in found if Place.ACCELERATOR in fit.left and not fit.short]
    fitting.sort(key=lambda fit: (order.index(fit.name), fit.plan.setup.stage))
    roomy = [fit for fit in fitting if _room(fit) >= ROOM_FOR_ACTIVATIONS]
    return roomy[0] if roomy else max(fitting, key=_room, default=None)


def _room(fit: Fit) -> float:
    left = fit.left[Place.ACCELERATOR]
    return left / (left + fit.plan.peak(Place.ACCELERATOR))


def config_of(fit: Fit) -> dict[str, Any]:
    """A DeepSpeed config for this way, complete for ``deepspeed.initialize``.

    Trainers on Accelerate want their own values, so there the first four entries and ``optimizer`` are ``"auto"``.
    """
    setup = fit.plan.setup
    zero: dict[str, Any] = {"stage": setup.stage}
    if setup.offload or setup.offload_param:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": setup.pins}
    if setup.host_share < 1.0:
        zero["offload_optimizer"] = {"device": "cpu", "ratio": setup.host_share}
    if setup.offload_param:
        zero["offload_param"] = {"device": "cpu", "pin_memory": setup.pins}
    if setup.zenflow is not None:
        zero["zenflow"] = setup.zenflow.model_dump(exclude_unset=True)
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 1.0,
        **({} if fit.plan.model.dtype == "float32" else {_SECTION_OF[fit.plan.model.dtype]: {"enabled": True}}),
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "betas": [0.9, 0.95], "weight_decay": 0.1}},
        "zero_optimization": zero,
    }


_SECTION_OF = {"bfloat16": "bf16", "float16": "fp16"}
