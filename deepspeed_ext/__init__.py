"""Offload and ZeRO extensions for DeepSpeed."""

from deepspeed_ext._version import __version__
from deepspeed_ext.affinity import snapshot

# Before torch: an OpenMP runtime that binds threads would narrow the mask that core binding starts from.
snapshot.take()

__all__ = ["__version__"]
