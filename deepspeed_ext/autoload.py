"""With ``DSEXT_AUTOLOAD=1``, enables the extension when DeepSpeed is imported, for trainers whose
code cannot call `enable`.

torch calls `autoload` at the end of its own import, as an entry point of the group
``torch.backends``, unless TORCH_DEVICE_BACKEND_AUTOLOAD=0. At that time DeepSpeed is not imported
yet, or only in part because it imports torch. Either way, the extension is enabled at the end of
DeepSpeed's import, before anything can use it.

Importing this module imports nothing that torch has not imported.
"""

import os
import sys
from importlib.machinery import ModuleSpec
from typing import Any, NoReturn

import deepspeed_ext

VARIABLE = "DSEXT_AUTOLOAD"
DEEPSPEED = "deepspeed"


def autoload() -> None:
    """If DSEXT_AUTOLOAD=1, enable the extension as soon as DeepSpeed is imported. Raises nothing,
    because an error would end the import of torch."""
    setting = os.environ.get(VARIABLE, "")
    if setting not in ("", "0", "1"):
        _log_error(f"{VARIABLE} must be 0 or 1, got {setting[:40]!r}; the extension stays off")
    elif setting == "1":
        try:
            _Watch().start()
        except Exception as error:
            _log_error(
                "DSEXT_AUTOLOAD=1 failed, and the extension stays off: "
                f"{type(error).__name__}: {error}"
            )


class _Watch:
    """An import finder that finds nothing: it notices DeepSpeed's first import of a submodule of
    its own, when DeepSpeed is partly imported."""

    def start(self) -> None:
        sys.meta_path.insert(0, self)
        if DEEPSPEED in sys.modules:
            _enable_when_imported()

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name.startswith(f"{DEEPSPEED}."):
            _enable_when_imported()

    @staticmethod
    def stop() -> None:
        sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _Watch)]


class _EndOfImport(ModuleSpec):
    """The spec of a module that is being imported; it enables the extension when that ends.

    Python has no hook for the end of an import, but then sets `_initializing` of the spec.
    """

    @property
    def _initializing(self) -> bool:
        return bool(vars(self)["_initializing"])

    @_initializing.setter
    def _initializing(self, value: bool) -> None:
        try:
            if DEEPSPEED in sys.modules:  # otherwise its import has failed
                _enable_when_imported(ended=self)  # while other threads still wait for the import
        finally:
            vars(self)["_initializing"] = value
            self.__class__ = ModuleSpec  # type: ignore[assignment]


def _enable_when_imported(ended: ModuleSpec | None = None) -> None:
    """Enable the extension once no import of DeepSpeed, or of our modules that import it, is still
    running."""
    for name, module in list(sys.modules.items()):
        spec = getattr(module, "__spec__", None)
        is_running = spec is not ended and getattr(spec, "_initializing", False)
        if is_running and (name == DEEPSPEED or name.startswith(f"{deepspeed_ext.__name__}.")):
            spec.__class__ = _EndOfImport
            return
    _enable()


def _enable() -> None:
    """Enable the extension. If that fails, log the error and make ``deepspeed.initialize`` raise,
    so that no run silently trains without it."""
    _Watch.stop()
    try:
        deepspeed_ext.enable()
    except Exception as error:
        failure = f"DSEXT_AUTOLOAD=1 failed: {type(error).__name__}: {error}"
        _log_error(
            f"{failure}. deepspeed.initialize will fail in this process; "
            f"{VARIABLE}=0 trains without the extension"
        )
        sys.modules[DEEPSPEED].initialize = _refusal(failure, error)  # type: ignore[attr-defined]


def _refusal(failure: str, cause: Exception) -> Any:
    """A ``deepspeed.initialize`` that raises: ranks with the extension and ranks without it would
    hang."""

    def initialize(*args: Any, **kwargs: Any) -> NoReturn:
        raise deepspeed_ext.errors.UnsupportedError(
            f"{failure}. Remove the cause, or set {VARIABLE}=0 "
            "on all ranks to train without the extension"
        ) from cause

    return initialize


def _log_error(message: str) -> None:
    # imported late, because logging is slow to import
    from deepspeed_ext.runtime.log import logger

    logger.error(message)
