"""Random programs of what a script calls on an engine; pure, so that the draws are a program.

A program is its settings and a list of operations, each a name of `program_side.OPERATIONS` and
its arguments. `tests.fuzz.usage` runs them.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

__all__ = ["Operation", "Program", "Settings", "draw"]

Operation = tuple[Any, ...]
NAMES = ("embed.weight", "norm.weight", "up.weight", "up.bias", "again.weight", "maybe.weight")
"""Parameters that operations change or read."""
ONLY_ODD = ("freeze", "skip", "zero_grad", "discarded", "crossed", "retained")
OURS = {"async_save": True}
"""Fields of ours that change no bit."""
INNER = {
    *("evaluate", "set_group", "get_master", "set_master", "get_state", "set_state", "gathered"),
    *("state_dict", "save", "save_16bit", "deepcopy", "teacher", "parameters", "wasted", "direct"),
    *("load", "load_latest", "local"),
}
"""Those that come between a backward pass and its step, too."""
LAYERS = ("up", "again", "maybe", "norm")


@dataclass(frozen=True)
class Settings:
    """Of both sides.

    Attributes:
        system: "offload": the exact rule beside ZeRO-Offload; "zero": tiered flattening or
            single-parameter gather beside ZeRO.
        client: the script's own AdamW, and its own scheduler.
        odd: with several backward passes at once, and parameters without gradients.
        zero: further fields of DeepSpeed.
        ours: further fields of ours.
    """

    system: str
    stage: int
    ranks: int
    device: str
    dtype: str
    accumulation: int
    odd: bool
    clipping: float
    scheduler: bool
    groups: bool
    client: bool
    zero: dict[str, Any]
    ours: dict[str, Any]


@dataclass(frozen=True)
class Program:
    """What both sides do."""

    settings: Settings
    operations: tuple[Operation, ...]

    def has(self, *names: str) -> bool:
        return any(name in names for name, *_ in self.operations)


def draw(rng: random.Random, **fixed: Any) -> Program:
    """A program by draws of `rng`, which may be one of hypothesis; `fixed` are settings that are
    given."""
    settings = replace(_settings(rng, fixed.get("system"), fixed.get("stage")), **fixed)
    operations: list[Operation] = []
    if rng.random() < 0.8:  # before it, the optimizer of ZeRO-Offload has no state
        operations += _step(rng, settings)
    for _ in range(rng.randint(4, 9)):
        if rng.random() < 0.6:
            operations += _odd(rng, settings)
        operations += _step(rng, settings)
    return Program(settings, tuple(operations))


def _settings(rng: random.Random, system: str | None, stage: int | None) -> Settings:
    system = system or rng.choice(["offload", "offload", "zero"])
    stage = stage or rng.choice([1, 2, 3])
    zero: dict[str, Any] = {}
    for name in ("overlap_comm", "contiguous_gradients", "reduce_scatter"):
        if rng.random() < 0.4:
            zero[name] = rng.random() < 0.5
    if rng.random() < 0.3:
        zero["reduce_bucket_size"] = 500
    ours: dict[str, Any] = {}
    if system == "offload":
        ours |= {name: value for name, value in OURS.items() if rng.random() < 0.15}
        if stage > 1 and rng.random() < 0.2:
            ours["gradients_on_host"] = True
        if stage == 3 and rng.random() < 0.2:
            zero["offload_param"] = {"device": "cpu", "pin_memory": False}
    if system == "zero" and stage < 3:
        ours["flatten_tier"] = rng.choice(["accelerator", "host"])
    return Settings(
        system=system,
        stage=stage,
        ranks=rng.choice([1, 1, 2]),
        device=rng.choice(["cpu", "cpu", "sim"]),
        dtype=rng.choice(["fp32", "bf16", "fp16"]),
        accumulation=rng.choice([1, 1, 1, 2, 3]),
        odd=rng.random() < 0.5,
        clipping=rng.choice([0.0, 0.0, 0.05, 1.0]),
        scheduler=rng.random() < 0.3,
        groups=rng.random() < 0.5,
        client=rng.random() < 0.3,
        zero=zero,
        ours=ours,
    )


def _pass(rng: random.Random, settings: Settings) -> Operation:
    """A forward and a backward pass: of which data, by whose backward, times what, without which
    layer, checkpointed how."""
    scale = rng.choice([1.0] * 12 + [0.0, 3.0])
    if settings.dtype != "fp32" and rng.random() < 0.06:
        scale = rng.choice([float("inf"), float("nan")])
    skips = settings.odd and rng.random() < 0.08
    how = rng.choice(["", "", "", "reentrant", "not reentrant"])
    way = rng.choice(["engine"] * 12 + ["scaled"] * 4 + ["loss"] * (settings.dtype != "fp16"))
    return ("backward", rng.randrange(1000), way, scale, skips, how)


def _step(rng: random.Random, settings: Settings) -> Iterator[Operation]:
    """One step, with all of its micro-steps."""
    kind = rng.random() if settings.odd else 1.0
    if kind < 0.06:
        yield ("boundary", False)
        for _ in range(rng.randint(0, 2)):
            yield _pass(rng, settings)
        yield ("boundary", True)
        yield _pass(rng, settings)
        yield ("step",)
        yield ("boundary", None)
        return
    if kind < 0.1 and settings.stage == 1:
        yield ("no_sync", _pass(rng, settings))
    elif kind < 0.14:
        yield ("coalesce", tuple(_pass(rng, settings) for _ in range(rng.randint(1, 2))))
        yield ("step",)
        return
    yield ("micro_steps", tuple(tuple(_micro_step(rng, settings)) for _ in range(3)))


def _micro_step(rng: random.Random, settings: Settings) -> Iterator[Operation]:
    """What is done before a call of `step`."""
    for _ in range(rng.choice([1, 1, 1, 1, 1, 2]) if settings.odd else 1):
        yield _pass(rng, settings)
    if rng.random() < 0.25:
        operation = rng.choice(ODD)(rng, settings)
        if operation[0] in INNER:
            yield operation


def _odd(rng: random.Random, settings: Settings) -> Iterator[Operation]:
    for _ in range(rng.choice([1, 1, 1, 2])):
        operation = rng.choice(ODD)(rng, settings)
        if settings.odd or operation[0] not in ONLY_ODD:
            yield operation


def _name(rng: random.Random) -> str:
    return rng.choice(NAMES)


def _even(rng: random.Random) -> str:
    """One that divides by two ranks: DeepSpeed sets no other at stage 3."""
    return rng.choice([name for name in NAMES if name != "up.bias"])


ODD: tuple[Callable[[random.Random, Settings], Operation], ...] = (
    lambda rng, _: ("evaluate", rng.randrange(1000), rng.choice(["no_grad", "inference", "grad"])),
    lambda rng, _: ("batch_size", rng.randint(1, 3)),
    lambda rng, _: ("set_group", "lr", rng.choice([0.0, 1e-3, 3e-2])),
    lambda rng, _: ("set_group", "weight_decay", rng.choice([0.0, 0.3])),
    lambda rng, _: ("set_group", "betas", rng.choice([(0.5, 0.9), (0.9, 0.999)])),
    lambda rng, _: ("freeze", rng.choice(LAYERS), rng.random() < 0.5),
    lambda rng, _: ("skip", rng.random() < 0.5),
    lambda rng, _: ("get_master", _name(rng)),
    lambda rng, _: ("set_master", _even(rng), rng.random() < 0.4),
    lambda rng, _: ("get_state", _name(rng), rng.choice(["exp_avg", "exp_avg_sq"])),
    lambda rng, _: ("set_state", _even(rng), rng.choice(["exp_avg", "exp_avg_sq"])),
    lambda rng, settings: ("grads", _pass(rng, settings), _even(rng), rng.random() < 0.5),
    lambda rng, _: ("gathered", _name(rng), rng.random() < 0.5),
    lambda rng, _: ("state_dict",),
    lambda rng, _: ("load_state_dict", rng.choice([0.5, 2.0])),
    lambda rng, _: ("save",),
    lambda rng, _: ("load", rng.choice(["", "", "module_only", "no_optimizer", "no_scheduler"])),
    lambda rng, _: ("load_anew", rng.choice(["", "", "", "module_only", "no_optimizer"])),
    lambda rng, _: ("save_16bit",),
    lambda rng, _: ("offload_states", rng.random() < 0.3),
    lambda rng, _: ("zero_grad", rng.choice(["engine", "optimizer", "module"])),
    lambda rng, settings: ("discarded", _pass(rng, settings), rng.choice(["engine", "optimizer"])),
    lambda rng, _: ("hook", _name(rng)),
    lambda rng, _: ("unhook",),
    lambda rng, _: ("deepcopy",),
    lambda rng, _: ("teacher", rng.randrange(1000)),
    lambda rng, _: ("anew",),
    lambda rng, _: ("rebuild",),
    lambda rng, _: ("wasted", rng.randrange(1000)),
    lambda rng, _: ("raises", rng.randrange(1000), rng.choice(LAYERS)),
    lambda rng, _: ("crossed", rng.randrange(1000)),
    lambda rng, _: ("retained", rng.randrange(1000)),
    lambda rng, _: ("after_hook", _name(rng)),
    lambda rng, _: ("save_again",),
    lambda rng, _: ("load_latest",),
    lambda rng, _: ("schedule",),
    lambda rng, _: ("keep",),
    lambda rng, _: ("load_kept",),
    lambda rng, _: ("direct", rng.randrange(1000), rng.choice(LAYERS)),
    lambda rng, _: ("set_group", "eps", rng.choice([1e-8, 1e-2])),
    lambda rng, _: ("local", _even(rng), rng.random() < 0.5),
    lambda rng, _: ("idle_step",),
    lambda rng, _: ("parameters",),
    lambda rng, _: ("train_mode", rng.random() < 0.5),
    lambda rng, _: ("optimizer_state_dict",),
)
