"""Device memory before, while and after `engine.offload_states` has moved everything to the
host."""

from __future__ import annotations

import torch
from deepspeed.accelerator import get_accelerator

from tests.support.models import OddModel, batches, on_device, two_groups
from tests.support.zenflow import RULES, make_engine, train, zenflow_config


class Adapted(OddModel):
    """A frozen parameter amid trained ones, which two groups take in another order."""

    def __init__(self, width: int = 37) -> None:
        super().__init__(width, awkward=True)
        del self.empty
        self.norm.requires_grad_(False)


def first_products() -> None:
    """Multiply matrices in the threads of forward and backward: a device's library allocates
    workspaces then, which stay and would count as something of the engine's."""
    device = get_accelerator().current_device_name()
    for dtype in (torch.float32, torch.bfloat16):
        linear = torch.nn.Linear(8, 8, device=device, dtype=dtype)
        linear(torch.ones(8, 8, device=device, dtype=dtype)).sum().backward()


BUCKET_NUMEL = 4_000_000
"""``reduce_bucket_size`` of `held` between micro-steps."""


def held(stage: int, rule: str, hidden: bool, micro_steps: int = 1) -> dict[str, int]:
    """Bytes on the accelerator: before the engine, between steps, while everything is away, and
    back again; with several micro-steps a step, also after one of them."""
    accelerator, found = get_accelerator(), {}

    def note(name: str) -> None:
        accelerator.synchronize()
        found[name] = accelerator.memory_allocated()

    first_products()
    data = [on_device(batch) for batch in batches(3 + 5 * micro_steps, rank=0)]
    note("before")
    config = zenflow_config(stage, accumulation=micro_steps, hide_transfers=hidden, **RULES[rule])
    if micro_steps > 1:
        config["zero_optimization"]["reduce_bucket_size"] = BUCKET_NUMEL
    # so wide that 70 kB of bias corrections, kept per device, hardly count
    engine = make_engine(config, model=lambda: Adapted(320), groups=two_groups)
    train(engine, data[: 5 * micro_steps])
    note("between steps")
    engine.offload_states()
    note("away")
    engine.reload_states()
    note("back")
    train(engine, data[5 * micro_steps : 5 * micro_steps + 1])
    if micro_steps > 1:
        note("between micro-steps")
        engine.offload_states()
        note("away from micro-steps")
        engine.reload_states()
    train(engine, data[5 * micro_steps + 1 :])
    note("after")
    engine.destroy()
    return found
