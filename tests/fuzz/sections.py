"""Target: the ZenFlow state of a checkpoint. `target` makes one of the function that checks it."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from deepspeed_ext.checkpoint.zenflow_state import VERSION
from deepspeed_ext.errors import CheckpointError
from deepspeed_ext.zenflow.rules.predictive.schedule import PredictiveState
from deepspeed_ext.zenflow.worker.kernel import AdamStep, LionStep
from deepspeed_ext.zenflow.worker.kernel.lion_pass import LION_STATE
from tests.fuzz import values
from tests.fuzz.target import Parts, Target, require

NUMELS = (70, 33)
ON_ACCELERATOR = (32, 0)
BLOCK_SIZE = 32
DTYPES = (
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.int32,
    torch.int64,
    torch.bool,
    torch.complex64,
)


def valid(rule: str) -> dict[str, Any]:
    """A section as a run with `rule` saves it, of two partitions; ``lion``: with that optimizer."""
    state = asdict(PredictiveState(is_exact=False))
    of_guard = {name: state[name] for name in ("is_ahead", "guard", "is_exact")}
    is_lion = rule == "lion"
    return {
        "version": VERSION,
        "rule": "predictive" if is_lion else rule,
        "optimizer": "lion" if is_lion else "adam",
        "moment_dtype": {"predictive": "int8"}.get(rule, "float32"),
        "weights": [torch.zeros(numel, dtype=torch.bfloat16) for numel in NUMELS],
        "kernel": "native",
        "block_size": BLOCK_SIZE,
        "schedule": {"steps": 5, "interval": 2}
        | (
            {"collected": 1, "is_in_flight": False, "since_selection": 1}
            if rule == "selective"
            else of_guard
        ),
        "updates": 5,
        "plan": {
            "host_share": 0.75,
            "hides_transfers": True,
            "gradients_on_host": False,
            "threads": 3,
            "device_seconds": 0.5,
            "host": "boot",
        },
        "partitions": [
            _partition(rule, *each) for each in zip(NUMELS, ON_ACCELERATOR, strict=True)
        ],
    }


def _partition(rule: str, whole: int, on_accelerator: int) -> dict[str, Any]:
    numel = whole - on_accelerator
    step = AdamStep(1e-3, 0.9, 0.95, 1e-8, 0.1, decoupled=True, step=5, grad_scale=1.0)
    blocks = -(-numel // BLOCK_SIZE)
    common = {"numel": whole, "on_accelerator": on_accelerator, "collected": [asdict(step)]}
    common["gradients"] = [torch.zeros(numel, dtype=torch.bfloat16)]
    if rule == "lion":
        width = LION_STATE.per_block_width(BLOCK_SIZE)
        return common | {
            "collected": [],
            "gradients": [],
            "last": asdict(LionStep(1e-3, 0.9, 0.95, 0.1, step=4, grad_scale=1.0)),
            "errors": None,
            "drift": None,
            "inverse": torch.zeros(blocks * width, dtype=torch.int32),
        }
    if rule == "selective":
        return common | {
            "collected": [],
            "gradients": [],
            "hot_blocks": torch.tensor([0]),
            "mean": torch.zeros(numel, dtype=torch.bfloat16),
            "last": asdict(step),
            "cold_updates": 4,
        }
    return common | {
        "last": asdict(replace(step, step=4)),
        "errors": {"prediction": 0.5, "rounding": 0.25, "update": 2.0},
        "drift": torch.zeros(numel, dtype=torch.bfloat16),
        "inverse": torch.ones(blocks),
    }


def make(rng: random.Random) -> Parts:
    """The rule, then edits: (path as numbers between 0 and 1, what is done there, seed of the new
    value)."""
    edits = [
        (
            [rng.random() for _ in range(rng.randint(0, 5))],
            rng.choice(CHANGES),
            rng.randrange(1 << 30),
        )
        for _ in range(rng.randint(0, 4))
    ]
    return [("rule", rng.choice(["predictive", "selective", "lion"])), *edits]


def build(parts: Parts) -> Any:
    """The section after all edits."""
    rule = next((part[1] for part in parts if part[0] == "rule"), "predictive")
    holder = [valid(rule)]
    for part in parts:
        if part[0] != "rule":
            path, change, seed = part
            _edit(holder, path, change, random.Random(seed))
    return holder[0]


def _edit(holder: list[Any], path: list[float], change: str, rng: random.Random) -> None:
    place, key = holder, 0
    for fraction in path:
        found: Any = place[key]
        keys = (
            list(found)
            if isinstance(found, dict)
            else list(range(len(found)))
            if isinstance(found, list)
            else []
        )
        if not keys:
            break
        place, key = found, keys[int(fraction * len(keys))]
    if change == "delete":
        place.pop(key)
        holder.extend([] if holder else [{}])
    elif change == "double":
        place[key] = [copy.copy(place[key]), place[key]]
    elif change == "tensor":
        place[key] = _tensor(rng)
    elif change == "reshape" and isinstance(place[key], torch.Tensor):
        place[key] = _reshaped(place[key], rng)
    elif change == "add" and isinstance(place[key], dict):
        place[key][values.text(rng)] = values.value(rng, 2)
    else:
        place[key] = values.value(rng)


CHANGES = ("delete", "double", "tensor", "reshape", "reshape", "add", "value", "value")


def _tensor(rng: random.Random) -> torch.Tensor:
    shape = rng.choice([(), (0,), (1,), (3,), (70,), (2, 35), (33, 1)])
    made = torch.ones(shape, dtype=rng.choice(DTYPES))
    return made.to_sparse() if rng.random() < 0.1 else made


def _reshaped(tensor: torch.Tensor, rng: random.Random) -> torch.Tensor:
    """Another size, dtype, layout or content."""
    if tensor.layout != torch.strided or tensor.device.type == "meta":
        return torch.ones(tensor.shape)
    kind = rng.randrange(6)
    if kind == 0:
        return tensor.reshape(-1)[: rng.randint(0, tensor.numel())]
    if kind == 1:
        return tensor.to(rng.choice(DTYPES))
    if kind == 2:
        return torch.cat([tensor.reshape(-1)] * 2)
    if kind == 3:
        return tensor.to("meta")
    if kind == 4:
        return tensor.reshape(1, -1)
    return torch.full_like(
        tensor, rng.choice([-1, 1 << 30]) if not tensor.is_floating_point() else float("nan")
    )


def target(check: Callable[[Any], None]) -> Target:
    """`check` returns for a section that can be restored and raises a CheckpointError for any
    other.

    Args:
        check: given a section of partitions of `NUMELS` elements.
    """

    def run(parts: Parts, folder: Path) -> None:
        try:
            check(build(parts))
        except CheckpointError as error:
            require(str(error))
            require(len(parts) > 1, f"a section as it was saved is refused: {error}")

    return Target("sections", make, run)
