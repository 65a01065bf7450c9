"""Names the buffers of DeepSpeed's ZeRO optimizers, and constants of their sizes.

Does not import DeepSpeed, so that memory can be planned without it.
"""

from __future__ import annotations

import enum

__all__ = ["START_ALIGNMENT", "Buffer"]

START_ALIGNMENT = 2
"""Elements per rank to which a flat buffer of stages 1 and 2 is aligned
(``nccl_start_alignment_factor``)."""


class Buffer(enum.Enum):
    """A buffer: its name in reports, and the attribute that holds it at stages 1 and 2, and at
    stage 3."""

    WEIGHTS = "weights", "bit16_groups_flat", "lp_param_buffer"
    MASTER = "master", "single_partition_of_fp32_groups", "fp32_partitioned_groups_flat"
    GRADIENTS = "gradients", "averaged_gradients", "grad_partitions_flat_buffer"
    BUCKETS = "reduction buckets", "ipg_buckets", "ipg_buckets"
    OFFLOAD = "offload buffer", "temp_grad_buffer_for_gpu_offload", None
    ACCUMULATED = "accumulated gradients", "accumulated_grads_in_cpu", "grad_partitions_flat_buffer"
    COPY = "16-bit copy of the weights", "param_buffer_of_bit16_for_cpu_offload_groups", None

    def __init__(self, shown: str, flat: str | None, partitioned: str | None) -> None:
        self.shown = shown
        self.flat = flat
        self.partitioned = partitioned
