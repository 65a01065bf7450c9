"""Imported first by DeepSpeed's test processes: enables the extension and injects a ``zenflow``
section.

`run` adds the import to a copy of DeepSpeed's tests, so it also happens in the ranks that they
start. With `SIMULATED` set, these processes have the simulated accelerator.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

if os.environ.get("DSEXT_SIMULATED") == "1":  # before anything asks for DeepSpeed's accelerator
    from tests.support.simulated_accelerator import accelerator

    accelerator.install()

import deepspeed

import deepspeed_ext

__all__ = ["ENABLED", "SIMULATED", "injected"]

ENABLED, SIMULATED = "DSEXT_INJECT", "DSEXT_SIMULATED"
"""Variables of the environment: 1 if the section is to be injected, and if the accelerator is the
simulated one."""

SECTION = {"overlap_step": False}
"""Without overlap ZenFlow equals ZeRO-Offload."""


def injected(config: Any) -> Any:
    """`config`, a dict or a file's path, as a dict with the section; unchanged without ZeRO, or if
    it has a section."""
    if isinstance(config, (str, Path)):
        if not os.path.exists(config):
            return config
        config = json.loads(Path(config).read_text())
    if not isinstance(config, dict):
        return config
    zero = config.get("zero_optimization")
    if not isinstance(zero, dict) or zero.get("stage", 0) not in (1, 2, 3) or "zenflow" in zero:
        return config
    return {**config, "zero_optimization": {**zero, "zenflow": SECTION}}


def without_fused_adam(config: Any) -> Any:
    """`config` with torch's Adam: DeepSpeed's fused one needs a kernel that the simulated
    accelerator has not."""
    if not isinstance(config, dict) or str(
        config.get("optimizer", {}).get("type", "")
    ).lower() not in (
        "adam",
        "adamw",
    ):
        return config
    optimizer = config["optimizer"]
    return {
        **config,
        "optimizer": {**optimizer, "params": {**optimizer.get("params", {}), "torch_adam": True}},
    }


def _wrapped(initialize: Callable[..., Any]) -> Callable[..., Any]:
    def with_section(*args: Any, **kwargs: Any) -> Any:
        if args and getattr(args[0], "deepspeed_config", None) is not None:
            kwargs.setdefault("config", args[0].deepspeed_config)
            args[0].deepspeed_config = None
        named = kwargs.get("args")
        if getattr(named, "deepspeed_config", None) is not None and kwargs.get("config") is None:
            kwargs["config"], named.deepspeed_config = named.deepspeed_config, None  # type: ignore[union-attr]
        for name in ("config", "config_params"):
            if kwargs.get(name) is not None:
                kwargs[name] = injected(kwargs[name]) if _IS_ENABLED else kwargs[name]
                kwargs[name] = without_fused_adam(kwargs[name]) if _IS_SIMULATED else kwargs[name]
        return initialize(*args, **kwargs)

    return with_section


_IS_ENABLED, _IS_SIMULATED = (os.environ.get(name) == "1" for name in (ENABLED, SIMULATED))
if _IS_ENABLED:
    deepspeed_ext.enable()
if _IS_ENABLED or _IS_SIMULATED:
    deepspeed.initialize = _wrapped(deepspeed.initialize)
