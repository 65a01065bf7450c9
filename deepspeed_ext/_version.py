"""The version of deepspeed_ext, in one place for the package and for setup.py."""

__version__ = "0.2.0"
