"""A training whose bits are those of any CPU, and what it leaves behind.

Gradients are multiples of 1/16 between -1/2 and 1/2, so that every sum of them and of their squares
is exact in whatever order a CPU adds them. What follows, Adam included, is elementwise, so the bits
are the same with AVX2 and with AVX-512. (Without fused multiplications, torch rounds the moments of
a share twice.) But torch takes roots with MKL, which rounds 17 of 100 otherwise on an EPYC than on
a Xeon, so the root in DeepSpeed's norm is NumPy's here. Weights decide the gradients, so an update
that comes at another step is seen.

It runs with the package that is first on the path, of any age, and knows of it `initialize` alone.
"""

from __future__ import annotations

import copy
import hashlib
from pathlib import Path
from typing import Any
from unittest.mock import patch

import deepspeed
import numpy as np
import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from torch import nn

import deepspeed_ext

STEPS, MIDDLE = 16, 8
GRID = 16
"""Steps of a gradient between 0 and 1."""


class Pull(torch.autograd.Function):
    """Half the squared distance between a weight and its target, in steps of a grid and at most
    1/2 each: shape of the weight -> []."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        distance = (weight.float() - target).mul(GRID).round().clamp(-GRID // 2, GRID // 2) / GRID
        ctx.distance, ctx.dtype = distance, weight.dtype
        return distance.square().sum() / 2

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return (ctx.distance * gradients[0]).to(ctx.dtype), None


class Piece(nn.Module):
    """A matrix and a vector, pulled to targets, with noise that a batch, two integers, gives."""

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        numbers = torch.arange(rows * columns + rows)
        start = ((numbers * 37 + rows) % 128 - 64).float() / 64
        self.weight = nn.Parameter(start[rows:].view(rows, columns).clone())
        self.bias = nn.Parameter(start[:rows].clone())

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        loss = torch.zeros((), device=batch.device)
        for parameter, factor in ((self.weight, 11), (self.bias, 29)):
            numbers = torch.arange(parameter.numel(), device=batch.device)
            noise = (((numbers + batch[0, 0]) * batch[0, 1] * factor) % 64 - 32).float() / 128
            target = ((numbers * factor) % 128 - 64).float() / 64 + noise
            loss = loss + Pull.apply(parameter, target.view(parameter.shape))
        return loss


class Pieces(nn.Module):
    """Pieces of odd sizes, 897 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.pieces = nn.ModuleList(Piece(*shape) for shape in ((13, 17), (5, 64), (19, 16)))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return torch.stack([piece(batch) for piece in self.pieces]).sum()


def batch(step: int, part: int, rank: int) -> torch.Tensor:
    """The batch of one micro-step, [1, 2] int64: every fourth step has the same targets again."""
    return torch.tensor([[5 * (step % 4) + part, 2 * rank + 3]])


def make_engine(config: dict[str, Any]) -> Any:
    """An engine around new `Pieces`; matrices decay, vectors do not."""
    if config["fp16"]["enabled"]:  # torch can on any CPU, slowly
        get_accelerator().is_fp16_supported = lambda: True
    torch.manual_seed(0)
    model = Pieces()
    groups = [
        {"params": [p for p in model.parameters() if p.ndim == 2], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0},
    ]
    engine, *_ = deepspeed_ext.initialize(
        model=model, model_parameters=groups, config=copy.deepcopy(config)
    )
    return engine


def digest(tensors: list[torch.Tensor]) -> str:
    """A hash of the bits of some tensors."""
    found = hashlib.sha256()
    for tensor in tensors:
        flat = tensor.detach().cpu().contiguous().view(-1)
        found.update(f"{tensor.dtype} {list(tensor.shape)} ".encode())
        found.update(flat.view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]


def state_digests(engine: Any, moments: list[str]) -> dict[str, str]:
    """Digests of the weights that training uses, of p and of `moments`."""
    engine.module.state_dict()  # weights that a step has left on their way arrive
    weights = []
    for parameter in engine.module.parameters():
        with deepspeed.zero.GatheredParameters([parameter], enabled=hasattr(parameter, "ds_id")):
            weights.append(parameter.detach().cpu().clone())
    found = {"weights": digest(weights)}
    parameters = list(engine.module.parameters())
    found["p"] = digest([safe_get_full_fp32_param(each) for each in parameters])
    for name in moments:
        found[name] = digest([safe_get_full_optimizer_state(each, name) for each in parameters])
    return found


def checkpoint_digest(folder: str, tag: str) -> str:
    """A digest of what DeepSpeed's tool reads from a checkpoint."""
    state = get_fp32_state_dict_from_zero_checkpoint(folder, tag)
    return digest([state[name] for name in sorted(state)])


def nearest_root(power: Any) -> Any:
    """``torch.Tensor.pow`` with the root that every CPU has."""

    def pow(self: torch.Tensor, exponent: Any) -> torch.Tensor:
        if exponent != 0.5 or self.dtype != torch.float32:
            return power(self, exponent)
        return torch.as_tensor(np.sqrt(self.cpu().numpy()), device=self.device)

    return pow


def run(config: dict[str, Any], folder: str, load: str = "") -> dict[str, Any]:
    """Train to the end and save in the middle and then: losses by step, digests of the state and of
    the checkpoints, number of skipped steps.

    Args:
        load: a folder whose checkpoint of the middle is loaded first; losses then begin after it.
    """
    powers = {name: nearest_root(getattr(torch.Tensor, name)) for name in ("pow", "__pow__")}
    with patch.multiple(torch.Tensor, **powers):
        return _run(config, folder, load)


def _run(config: dict[str, Any], folder: str, load: str) -> dict[str, Any]:
    rank = dist.get_rank()
    engine = make_engine(config)
    if load:
        path, _ = engine.load_checkpoint(load, tag=str(MIDDLE))
        assert path, f"{load} has no checkpoint {MIDDLE}"
    losses = []
    for step in range(MIDDLE if load else 0, STEPS):
        for part in range(config["gradient_accumulation_steps"]):
            loss = engine(batch(step, part, rank).to(get_accelerator().current_device_name()))
            engine.backward(loss)
            engine.step()
            losses.append(loss.item().hex())
        if step + 1 in (MIDDLE, STEPS):
            engine.save_checkpoint(folder, tag=str(step + 1))
    moments = ["exp_avg"] if config["optimizer"]["type"] == "Lion" else ["exp_avg", "exp_avg_sq"]
    state = state_digests(engine, moments)
    found = {"losses": losses, "skipped": engine.skipped_steps, "state": state}
    engine.destroy()
    dist.barrier()
    found["saved"] = [
        checkpoint_digest(folder, tag)
        for tag in map(str, (MIDDLE, STEPS))
        if Path(folder, tag).is_dir()
    ]
    return found
