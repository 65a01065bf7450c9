"""The elementwise arithmetic of a step: one Triton kernel for each of its parts, and their
definition in torch.

`definition` defines what they compute. `device` holds the Triton kernels and is imported only if
Triton is installed. `host` is one pass of the native library on the CPU. `launch` chooses;
`prepare` compiles at engine start. The worker's pass over host memory is in
`zenflow.worker.kernel`.
"""

from deepspeed_ext.zenflow.kernels.definition import CLAMP, HotConstants, root
from deepspeed_ext.zenflow.kernels.launch import (
    hot_step,
    missing,
    move,
    norms,
    predict,
    serves,
    share_step,
)

__all__ = [
    "CLAMP",
    "HotConstants",
    "hot_step",
    "missing",
    "move",
    "norms",
    "predict",
    "root",
    "serves",
    "share_step",
]
