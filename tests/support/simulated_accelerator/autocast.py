"""Autocast on the simulated accelerator: matrix products in the lower precision, sums and losses in
fp32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_map

__all__ = ["register"]

LOWERED = (
    "linear matmul mm bmm addmm addbmm baddbmm conv1d conv2d conv3d scaled_dot_product_attention"
)
RAISED = (
    "softmax log_softmax layer_norm nll_loss cross_entropy_loss "
    "mse_loss pow prod cumsum norm exp log sum"
)
_KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)  # type: ignore[attr-defined]


def register() -> tuple[torch.library.Library, ...]:
    """Register the kernels; they last as long as what this returns."""
    everything = torch.library.Library("_", "IMPL")
    everything.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    aten = torch.library.Library("aten", "IMPL")
    for names, is_lowered in ((LOWERED, True), (RAISED, False)):
        for name in names.split():
            packet = getattr(torch.ops.aten, name)
            for overload in packet.overloads():
                if (
                    not overload.endswith("out")
                    and not overload.startswith("Dimname")
                    and "names" not in overload
                ):
                    operator = getattr(packet, overload)
                    aten.impl(operator, _kernel(operator, is_lowered), "AutocastPrivateUse1")
    return everything, aten


def _kernel(operator: Any, is_lowered: bool) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        dtype = torch.get_autocast_dtype("sim") if is_lowered else torch.float32

        def cast(value: Any) -> Any:
            if (
                isinstance(value, torch.Tensor)
                and value.is_floating_point()
                and value.dtype != torch.float64
            ):
                return value.to(dtype)
            return value

        with torch._C._ExcludeDispatchKeyGuard(_KEYS):
            return operator(*tree_map(cast, args), **tree_map(cast, kwargs))

    return run
