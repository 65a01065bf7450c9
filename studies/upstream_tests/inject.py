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

__all__ = ["SECTION", "SIMULATED", "injected"]

SECTION, SIMULATED = "DSEXT_SECTION", "DSEXT_SIMULATED"
"""Variables of the environment: the section that is injected, as JSON, or nothing; and 1 if the
accelerator is the simulated one."""


def injected(config: Any) -> Any:
    """`config`, a dict or a file's path, as a dict with the section; unchanged if its optimizer is
    not offloaded, or if it has a section."""
    if isinstance(config, (str, Path)):
        if not os.path.exists(config):
            return config
        config = json.loads(Path(config).read_text())
    if not isinstance(config, dict):
        return config
    zero = config.get("zero_optimization")
    if not isinstance(zero, dict) or "zenflow" in zero or not _offloads(zero):
        return config
    return {**config, "zero_optimization": {**zero, "zenflow": json.loads(_SECTION)}}


def _offloads(zero: dict[str, Any]) -> bool:
    offload = zero.get("offload_optimizer")
    device = (
        offload.get("device") if isinstance(offload, dict) else getattr(offload, "device", None)
    )
    return getattr(device, "value", device) == "cpu" and zero.get("stage", 0) in (1, 2, 3)


def without_fused_adam(config: Any) -> Any:
    """`config` with torch's Adam: DeepSpeed's fused one needs a kernel that the simulated
    accelerator has not."""
    if not isinstance(config, dict) or str(
        config.get("optimizer", {}).get("type", "")
    ).lower() not in ("adam", "adamw"):
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
                kwargs[name] = injected(kwargs[name]) if _SECTION else kwargs[name]
                kwargs[name] = without_fused_adam(kwargs[name]) if _IS_SIMULATED else kwargs[name]
        return initialize(*args, **kwargs)

    return with_section


_SECTION, _IS_SIMULATED = os.environ.get(SECTION, ""), os.environ.get(SIMULATED) == "1"
if _SECTION:
    deepspeed_ext.enable()
if _SECTION or _IS_SIMULATED:
    deepspeed.initialize = _wrapped(deepspeed.initialize)
