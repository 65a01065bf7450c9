"""Lets DeepSpeed and this package read a config before anything starts, and reports what they
refuse."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

from pydantic import ValidationError

from deepspeed_ext.adapter import upstream as _upstream
from deepspeed_ext.adapter.zero_config import ZeroConfig
from deepspeed_ext.commands.verify.figures import Failure
from deepspeed_ext.config.file import section_of
from deepspeed_ext.errors import ConfigError
from deepspeed_ext.zenflow.step.supported import require_section

__all__ = ["is_refusal", "require_readable", "require_section_readable"]

REFUSED = {
    "ValueError",
    "TypeError",
    "KeyError",
    "AssertionError",
    "NotImplementedError",
    "DeepSpeedConfigError",
}
"""Types of exceptions with which DeepSpeed and this package refuse a config."""


def is_refusal(failure: Failure) -> bool:
    """Whether an exception means that the config is refused."""
    return bool(REFUSED & set(failure.kinds))


def require_section_readable(user: Mapping[str, Any]) -> None:
    """Read ``zero_optimization`` as ``deepspeed_ext.initialize`` does.

    Raises:
        ConfigError: with the text of that error.
    """
    try:
        zero = ZeroConfig(**section_of(user, "zero_optimization"))
        if zero.zenflow is not None:
            require_section(zero)
    except ValidationError as error:
        raise ConfigError(_short(error, "zero_optimization")) from None


def require_readable(config: dict[str, Any], upstream: bool) -> None:
    """Read the whole config of a check as DeepSpeed does, with this package unless `upstream`.

    Raises:
        ConfigError: DeepSpeed refuses it.
    """
    with ExitStack() as swaps:
        if not upstream:
            swaps.enter_context(_upstream.swapped(_upstream.zero_section_class(ZeroConfig)))
        try:
            _upstream.deepspeed.DeepSpeedConfig(config)
        except ConfigError:
            raise
        except ValidationError as error:
            raise ConfigError(_short(error, error.title)) from None
        except Exception as error:
            failure = Failure.of("initialize", error)
            if not is_refusal(failure):
                raise
            raise ConfigError(f"this config cannot train: {failure}") from None


def _short(error: ValidationError, section: str) -> str:
    """The mistakes that only DeepSpeed's own models notice, in one line."""
    return "; ".join(
        f"{'.'.join([section, *map(str, mistake['loc'])])} "
        f"= {str(mistake['input'])[:100]!r}: {mistake['msg']}"
        for mistake in error.errors()
    )
