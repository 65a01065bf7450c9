"""A model that is spread over tensor-parallel ranks, written as Megatron's layers are, and its
``mpu``."""

from __future__ import annotations

from typing import Any

import torch
from deepspeed import comm as dist

__all__ = ["Grid", "TensorParallelBlock", "replicated"]


class Grid:
    """An ``mpu`` of ``world / tensor`` data-parallel times `tensor` tensor-parallel ranks, of which
    the latter are neighbours."""

    def __init__(self, tensor: int) -> None:
        world, rank = dist.get_world_size(), dist.get_rank()
        rows = [list(range(first, first + tensor)) for first in range(0, world, tensor)]
        columns = [list(range(first, world, tensor)) for first in range(tensor)]
        groups = {tuple(members): dist.new_group(members) for members in [*rows, *columns]}
        self._tensor = next(tuple(members) for members in rows if rank in members)
        self._data = next(tuple(members) for members in columns if rank in members)
        self._groups = groups

    def get_model_parallel_group(self) -> Any:
        return self._groups[self._tensor]

    get_tensor_model_parallel_group = get_model_parallel_group

    def get_model_parallel_rank(self) -> int:
        return self._tensor.index(dist.get_rank())

    get_tensor_model_parallel_rank = get_model_parallel_rank

    def get_model_parallel_world_size(self) -> int:
        return len(self._tensor)

    get_tensor_model_parallel_world_size = get_model_parallel_world_size

    def get_data_parallel_group(self) -> Any:
        return self._groups[self._data]

    def get_data_parallel_rank(self) -> int:
        return self._data.index(dist.get_rank())

    def get_data_parallel_world_size(self) -> int:
        return len(self._data)


class _SumOfGradients(torch.autograd.Function):
    """Copies forward; sums gradients over the group backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        total = grads[0].contiguous().clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None


class _Sum(torch.autograd.Function):
    """Sums over the group forward; copies gradients backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        total = x.contiguous().clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return grads[0], None


class TensorParallelBlock(torch.nn.Module):
    """LayerNorm, a linear layer divided by columns and one by rows, whose bias is replicated.

    Args:
        width: of the input; needs no relation to ZenFlow's blocks.
    """

    def __init__(self, mpu: Grid, width: int = 64, inner: int = 256) -> None:
        super().__init__()
        self._group = mpu.get_model_parallel_group()
        share = inner // mpu.get_model_parallel_world_size()
        rank = mpu.get_model_parallel_rank()
        self.norm = torch.nn.LayerNorm(width)
        self.up = torch.nn.Linear(width, share)
        self.down = torch.nn.Linear(share, width, bias=False)
        self.bias = torch.nn.Parameter(torch.zeros(width))
        for name, param in self.named_parameters():
            if name in replicated(self):
                continue
            for mark in ("model_parallel", "tensor_model_parallel"):
                setattr(param, mark, True)
            with torch.no_grad():
                param.normal_(0.0, 0.1, generator=torch.Generator().manual_seed(100 + rank))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = torch.nn.functional.gelu(self.up(_SumOfGradients.apply(self.norm(x), self._group)))
        y = _Sum.apply(self.down(inner), self._group) + self.bias + x
        return (y.float() - 1.0).square().mean()


def replicated(model: torch.nn.Module) -> list[str]:
    """Names of the parameters of which every tensor-parallel rank has all."""
    return [name for name, _ in model.named_parameters() if name.startswith(("norm", "bias"))]
