"""Device memory before, while and after `engine.offload_states` has moved everything to the host."""

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
    """Multiply matrices in the threads of forward and backward: a device's library allocates workspaces then, which
    stay and would count as something of the engine's."""
    device = get_accelerator().current_device_name()
    for dtype in (torch.float32, torch.bfloat16):
        linear = torch.nn.Linear(8, 8, device=device, dtype=dtype)
        linear(torch.ones(8, 8, device=device, dtype=dtype)).sum().backward()


def held(stage: int, rule: str, hidden: bool) -> dict[str, int]:
    """Bytes on the accelerator: before the engine, between steps, while everything is away, and back again."""
    accelerator, found = get_accelerator(), {}

    def note(name: str) -> None:
        accelerator.synchronize()
        found[name] = accelerator.memory_allocated()

    first_products()
    note("before")
    config = zenflow_config(stage, hide_transfers=hidden, **RULES[rule])
    engine = make_engine(config, model=lambda: Adapted(160), groups=two_groups)
    data = [on_device(batch) for batch in batches(8, rank=0)]
    note("inputs")
    train(engine, data[:5])
    note("between steps")
    engine.offload_states()
    note("away")
    engine.reload_states()
    note("back")
    train(engine, data[5:])
    note("after")
    engine.destroy()
    return found
