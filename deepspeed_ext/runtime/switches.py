"""Variables of the environment that switch something off."""

import os

from deepspeed_ext.runtime.log import warn_once
from deepspeed_ext.runtime.words import quoted

__all__ = ["is_off"]


def is_off(variable: str) -> bool:
    """Whether the variable is 0. A value other than 0 and 1 counts as 1, with a warning."""
    value = os.environ.get(variable, "") or "1"
    if value not in ("0", "1"):
        warn_once(f"{variable} must be 0 or 1, got {quoted(value)}; it counts as 1")
    return value == "0"
