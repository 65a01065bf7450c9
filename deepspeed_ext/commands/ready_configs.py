"""Finds the ready-made configs and the editor schema of the folder ``configs``, in a checkout or a
wheel."""

from __future__ import annotations

from pathlib import Path

from deepspeed_ext.errors import ConfigError
from deepspeed_ext.runtime.words import quoted

__all__ = ["config_text", "listing"]

PACKAGE = Path(__file__).resolve().parent.parent
FOLDER = PACKAGE / "configs" if (PACKAGE / "configs").is_dir() else PACKAGE.parent / "configs"
"""A wheel has them inside the package (see setup.py)."""


def listing() -> str:
    """The folder's path, and the names that `config_text` accepts, one per line."""
    return "\n".join([f"in {FOLDER}:", *(f"  {name}" for name in _files())])


def config_text(name: str) -> str:
    """The content of a config, by the name of its file with or without ``.json``.

    Raises:
        ConfigError: there is no config of this name.
    """
    files = _files()
    path = files.get(name.removesuffix(".json"))
    if path is None:
        raise ConfigError(f"expected one of {', '.join(files)}, got {quoted(name)}")
    return path.read_text()


def _files() -> dict[str, Path]:
    return {path.stem: path for path in sorted(FOLDER.glob("*.json"))}
