"""Euclidean norms of gradients, as exact as in fp64, without a copy of the gradients in fp64."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._foreach_utils import _device_has_foreach_support

from deepspeed_ext._upstream import counted_alike, get_accelerator

__all__ = ["fused_l2_norms", "l2_norm", "stand_ins"]

_ROW = 512
_ROWS_ON_CPU = 2048


def l2_norm(tensor: torch.Tensor) -> torch.Tensor:
    """The Euclidean norm in one pass: of rows in fp32, of the rows' norms in fp64; 1 element, on the device.

    As exact as fp64 throughout to the last bits of fp32, because a row is short. Infinite if an element is, or is
    beyond 1e19; NaN if one is.
    """
    flat = tensor.detach().reshape(-1)
    whole = flat.numel() // _ROW * _ROW
    rows = flat[:whole].view(-1, _ROW)
    # On the CPU torch converts 16-bit input before it reduces: a piece at a time stays in the cache.
    pieces = rows.split(_ROWS_ON_CPU) if flat.device.type == "cpu" else (rows,)
    norms = [torch.linalg.vector_norm(piece, dim=1, dtype=torch.float32) for piece in pieces]
    norms.append(torch.linalg.vector_norm(flat[whole:], dtype=torch.float32).view(1))
    exact = torch.float64 if get_accelerator().is_fp64_supported() else torch.float32
    return torch.linalg.vector_norm(torch.cat(norms).to(exact)).view(1)


def fused_l2_norms(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The norms of many tensors, which the accelerator converts and adds up in fp64 as it reads them.

    Returns:
        0-D fp64 tensors on the tensors' device, in order. Two launches for some hundred tensors of one dtype.
    """
    norms: dict[int, torch.Tensor] = {}
    for dtype in {tensor.dtype for tensor in tensors}:  # one dtype at a time: a mixture is not fused
        indices = [index for index, tensor in enumerate(tensors) if tensor.dtype == dtype]
        found = torch._foreach_norm([tensors[index].detach() for index in indices], 2, dtype=torch.float64)
        norms.update(zip(indices, found, strict=True))
    return [norms[index] for index in range(len(tensors))]


def stand_ins(gradients: Sequence[torch.Tensor], params: Sequence[Any]) -> list[torch.Tensor]:
    """Tensors of one element that have the norms of `gradients`, for DeepSpeed to take the norm of.

    Args:
        gradients: any shapes; zero padding that DeepSpeed has marked is passed on.
        params: the parameters of the gradients that are no padding, in order.

    Returns:
        One for each of `gradients`; a single one for all of them where the accelerator takes their norms together and
        DeepSpeed would count each of them alike: what it launches itself is then little too.
    """
    real = [grad for grad in gradients if not getattr(grad, "_zero_padding", False)]
    if not real or not _fuses(real[0].device):
        return [grad if getattr(grad, "_zero_padding", False) else l2_norm(grad) for grad in gradients]
    full = [grad for grad in real if grad.numel()]  # the fused norm of an empty tensor is undefined on an accelerator
    if counted_alike(params) and full:
        return [torch.linalg.vector_norm(torch.stack(fused_l2_norms(full))).view(1)]
    norms = iter(fused_l2_norms(full))
    return [next(norms).view(1) if grad.numel() else l2_norm(grad) for grad in real]


def _fuses(device: torch.device) -> bool:
    """Whether `fused_l2_norms` is fused on `device`: elsewhere it is a loop with a copy of each gradient in fp64."""
    return device.type != "cpu" and _device_has_foreach_support(device) and get_accelerator().is_fp64_supported()
