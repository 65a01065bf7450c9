"""Tells whether a save under a tag could be found again."""

from __future__ import annotations

import os

__all__ = ["why_unusable"]

_RESERVED = ".dsext-"
_FILES_BESIDE = ("latest", "latest_universal", "zero_to_fp32.py", "zero_to_torch.py")
"""What DeepSpeed writes into the folder of all tags."""


def why_unusable(tag: str) -> str | None:
    """What is wrong with a tag as a name; None: nothing."""
    parts = tag.split(os.sep)
    if tag != tag.strip() or any(character < " " or character == "\x7f" for character in tag):
        return "has spaces at its ends or control characters, which the file `latest` does not keep"
    if os.pardir in parts:
        return "goes through '..'"
    if any(_RESERVED in part for part in parts):
        return f"contains {_RESERVED!r}, the mark of unfinished saves, which a later save removes"
    if os.path.normpath(tag).split(os.sep)[0] in _FILES_BESIDE:
        return "is the name of a file beside the tags"
    try:
        tag.encode()
    except UnicodeEncodeError:
        return "is no text that UTF-8 can hold"
    return None
