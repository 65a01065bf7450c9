"""Offload and ZeRO extensions for DeepSpeed."""

from deepspeed_ext._version import __version__

__all__ = ["__version__"]
