"""Offload and ZeRO extensions for DeepSpeed.

    import deepspeed, deepspeed_ext
    deepspeed_ext.enable()
    engine, *_ = deepspeed.initialize(...)      # now accepts the fields of deepspeed_ext.config

Importing this package imports neither torch nor DeepSpeed; the functions below do.
"""

from typing import Any

from deepspeed_ext import errors
from deepspeed_ext.cores import record_mask

# Before torch: an OpenMP runtime that binds threads
# would narrow the mask that core binding starts from.
record_mask()

__all__ = ["__version__", "disable", "enable", "errors", "initialize", "weight_parts", "weights"]

__version__ = "0.2.0"


def enable() -> None:
    """Make ``deepspeed.initialize`` accept the extended config and build the extended optimizers.
    Idempotent.

    Raises:
        UpstreamError: the installed DeepSpeed is outside the supported range, or lacks a member
            that we rely on.
    """
    from deepspeed_ext.adapter import engine

    engine.enable()


def disable() -> None:
    """Undo `enable` and restore DeepSpeed. Existing engines keep working. Idempotent."""
    from deepspeed_ext.adapter import engine

    engine.disable()


def initialize(*args: Any, **kwargs: Any) -> Any:
    """``deepspeed.initialize`` with the extension on for this call only; same arguments, same
    return values."""
    from deepspeed_ext.adapter import engine

    return engine.initialize(*args, **kwargs)


def weights(engine: Any, bucket_bytes: int = 1 << 28, on_rank: int | None = None) -> Any:
    """Iterate over the exact weights of an engine with ZenFlow, whole, from host memory.

    Also works between `engine.offload_states` and `reload_states`, and uses no accelerator memory.
    A collective: every rank calls it and iterates to the end, between two steps.

    Args:
        bucket_bytes: bytes of the tensors that are built at a time. A rank needs twice that in host
            memory, and at least twice the largest parameter.
        on_rank: the only data-parallel rank that gets the weights; None: every rank gets them.

    Returns:
        An iterator of (name in the state dict, tensor): p rounded to the nearest value of the
        weight's dtype, on the host; frozen parameters and buffers as they are. All names of a tied
        parameter share one tensor. Yielded tensors stay valid.

    Raises:
        PlanMismatchError: on every rank, if the ranks give different arguments.
        StateError: the engine stepped during the iteration, or a rank stopped it early; raised on
            all ranks.
        UnsupportedError: the engine has no ZenFlow, or has experts, tensor-parallel ranks, pipeline
            stages or quantized weights.
        ValueError: `bucket_bytes` is not positive, or there is no rank `on_rank`.
        WorkerError: on every rank, if any rank's optimizer process has failed.
    """
    from deepspeed_ext.adapter import weight_stream

    return weight_stream.weights(engine, bucket_bytes, on_rank)


def weight_parts(engine: Any) -> Any:
    """Like `weights`, but iterate over this rank's shard, without communication.

    Only the call is a collective, not the iteration. Replicated tensors come from rank 0 alone.

    Returns:
        An iterator of parts with ``names``, ``shape`` of the whole tensor, ``begin``, the row-major
        index of the first element, and ``values``, 1-D on the host. A rank may have no parts.

    Raises:
        StateError, UnsupportedError, WorkerError: as `weights`.
    """
    from deepspeed_ext.adapter import weight_stream

    return weight_stream.weight_parts(engine)
