"""Computes Euclidean norms of gradients, about as exact as in fp64, without an fp64 copy of the gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._foreach_utils import _device_has_foreach_support

from deepspeed_ext.adapter.upstream import counted_alike
from deepspeed_ext.runtime.backend import get_accelerator
from deepspeed_ext.zenflow import kernels

__all__ = ["fused_l2_norms", "gradient_norm", "known_norm_tensors", "l2_norm", "norm_tensors"]

_ROW = 512
_ROWS_ON_CPU = 2048


def l2_norm(tensor: torch.Tensor) -> torch.Tensor:
    """The Euclidean norm in one pass: norms of rows in fp32, then the norm of those in fp64.

    Rows are short, so the result is as exact as with fp64 throughout, up to the last bits of fp32. An accelerator
    without fp64 uses fp32 for both.

    Args:
        tensor: any shape, float dtype and device.

    Returns:
        1-D, one element, fp64 (or fp32), on the same device. Infinite if an element is infinite or exceeds 1e19 in
        magnitude; NaN if an element is NaN.
    """
    flat = tensor.detach().reshape(-1)
    whole = flat.numel() // _ROW * _ROW
    rows = flat[:whole].view(-1, _ROW)
    # On the CPU torch converts 16-bit input before it reduces; pieces keep the converted copy in the cache.
    pieces = rows.split(_ROWS_ON_CPU) if flat.device.type == "cpu" else (rows,)
    norms = [torch.linalg.vector_norm(piece, dim=1, dtype=torch.float32) for piece in pieces]
    norms.append(torch.linalg.vector_norm(flat[whole:], dtype=torch.float32).view(1))
    exact = torch.float64 if get_accelerator().is_fp64_supported() else torch.float32
    return torch.linalg.vector_norm(torch.cat(norms).to(exact)).view(1)


def fused_l2_norms(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The norms of many tensors; the accelerator converts to fp64 and sums as it reads.

    Args:
        tensors: any shapes and float dtypes, on one device.

    Returns:
        0-D fp64 tensors on the tensors' device, in order. A few hundred tensors of one dtype take two launches.
    """
    norms: dict[int, torch.Tensor] = {}
    for dtype in {tensor.dtype for tensor in tensors}:  # one dtype at a time: mixed dtypes are not fused
        indices = [index for index, tensor in enumerate(tensors) if tensor.dtype == dtype]
        same = [tensors[index].detach() for index in indices]
        if kernels.serves(1, *same):
            found = list(kernels.norms(same).unbind())
        else:
            found = list(torch._foreach_norm(same, 2, dtype=torch.float64))
        norms.update(zip(indices, found, strict=True))
    return [norms[index] for index in range(len(tensors))]


def norm_tensors(gradients: Sequence[torch.Tensor], params: Sequence[Any]) -> list[torch.Tensor]:
    """One-element tensors with the same norms as `gradients`, so that DeepSpeed computes the total norm from them
    cheaply.

    Args:
        gradients: any shapes; zero padding that DeepSpeed has marked may be among them.
        params: the parameters of the gradients that are not padding, in order.

    Returns:
        Usually one tensor per gradient, with padding passed through. If the accelerator fuses the norms, padding is
        dropped; if DeepSpeed would also count all parameters in the same way, a single tensor replaces all gradients,
        which saves DeepSpeed's own launches.
    """
    real = [grad for grad in gradients if not getattr(grad, "_zero_padding", False)]
    if not real or not _fuses(real[0].device):
        return [grad if getattr(grad, "_zero_padding", False) else l2_norm(grad) for grad in gradients]
    full = [grad for grad in real if grad.numel()]  # the fused norm of an empty tensor is undefined on an accelerator
    norms = fused_l2_norms(full)
    if counted_alike(params) and full:
        return [_of_all(norms)]
    left = iter(norms)
    return [next(left).view(1) if grad.numel() else l2_norm(grad) for grad in real]


def gradient_norm(gradient: torch.Tensor) -> torch.Tensor:
    """The norm that `norm_tensors` finds for one gradient: 1-D, one element, on its device."""
    is_fused = gradient.numel() > 0 and _fuses(gradient.device)
    return fused_l2_norms([gradient])[0].view(1) if is_fused else l2_norm(gradient)


def known_norm_tensors(norms: Sequence[torch.Tensor], params: Sequence[Any]) -> list[torch.Tensor]:
    """What `norm_tensors` returns for gradients whose norms `gradient_norm` has found.

    Args:
        norms: 1-D, one element each, on the accelerator.
        params: their parameters, in order.
    """
    return [_of_all(norms)] if norms and _fuses(norms[0].device) and counted_alike(params) else list(norms)


def _of_all(norms: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.linalg.vector_norm(torch.stack([norm.view(()) for norm in norms])).view(1)


def _fuses(device: torch.device) -> bool:
    """Whether `fused_l2_norms` is fused on `device`; otherwise it loops and makes an fp64 copy of each gradient."""
    has_kernel = kernels.missing(device) is None or _device_has_foreach_support(device)
    return device.type != "cpu" and has_kernel and get_accelerator().is_fp64_supported()
