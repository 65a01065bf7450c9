"""The elementwise arithmetic of a step: one Triton kernel for each of its parts, and their
definition in torch.

`definition` defines what they compute, `lion` and `rounded` likewise for Lion and for moments of
fewer bits. `device` holds the Triton kernels and is imported only if
Triton is installed. `host` is one pass of the native library on the CPU. `launch` chooses;
`prepare` compiles at engine start. The worker's pass over host memory is in
`zenflow.worker.kernel`.
"""

from deepspeed_ext.zenflow.kernels.definition import CLAMP, AdamConstants
from deepspeed_ext.zenflow.kernels.launch import (
    missing,
    norms,
    predict,
    serves,
    share_step,
)
from deepspeed_ext.zenflow.kernels.rounded import rounded_step
from deepspeed_ext.zenflow.worker.kernel.roots import root

__all__ = [
    "CLAMP",
    "AdamConstants",
    "missing",
    "norms",
    "predict",
    "root",
    "rounded_step",
    "serves",
    "share_step",
]
