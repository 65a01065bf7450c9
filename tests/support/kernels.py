"""What tests of the kernel share: the kernels that run here, and tensors as the kernel sees
them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch

from deepspeed_ext.zenflow.worker.kernel import Array, Kernel, Pass, library_path, load_kernel
from deepspeed_ext.zenflow.worker.kernel.adam_pass import ADAM_STATE
from deepspeed_ext.zenflow.worker.kernel.lion_pass import LION_STATE
from deepspeed_ext.zenflow.worker.kernel.passes import dtype_name

LIBRARY = library_path()
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
needs_native = pytest.mark.skipif(
    LIBRARY is None, reason="no native kernel and no C++ compiler here"
)
KERNELS = [pytest.param("native", marks=needs_native), "reference"]


def make_kernel(name: str, threads: int = 1) -> Kernel:
    return load_kernel(LIBRARY if name == "native" else None, threads)


def array(tensor: torch.Tensor) -> Array:
    return Array(tensor.data_ptr(), dtype_name(tensor.dtype), tensor.numel())


def make_pass(
    tensors: Mapping[str, torch.Tensor],
    block: int,
    publish: Any,
    grad: torch.Tensor | None = None,
    step: Any = None,
    part: tuple[int, int] | None = None,
    **how: Any,
) -> Pass:
    """A pass over the elements of `part`, all by default, of tensors by kind: ``p``, the moments,
    their scales, ``y`` and perhaps the per-block array. With a ``v`` it is Adam's. `how` are other
    fields of it."""
    dtype = dtype_name(tensors["m"].dtype)
    layout = replace(ADAM_STATE, moment_dtype=dtype) if "v" in tensors else LION_STATE
    begin, end = part or (0, tensors["p"].numel())
    first, last = begin // block, -(-end // block)
    (kind, _), width = layout.per_block, layout.per_block_width(block)
    means = tensors.get(kind)
    return Pass(
        layout,
        (
            *(array(tensors[name]).part(begin, end) for name in layout.kinds),
            *(array(tensors[name]).part(first, last) for name in layout.scales),
        ),
        array(tensors["y"]).part(begin, end),
        block,
        publish,
        None if grad is None else array(grad).part(begin, end),
        step,
        None if means is None else array(means).part(first * width, last * width),
        **{"first": begin, **how},
    )
