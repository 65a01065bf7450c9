"""Decides a rank's batch sizes from those of a config. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from deepspeed_ext.config.file import count_in
from deepspeed_ext.errors import ConfigError
from deepspeed_ext.runtime.words import counted

__all__ = ["Batches", "plan_batches"]

MOST_MICRO, MOST_ACCUMULATION = 8, 8
AUTO_MICRO = 4


@dataclass(frozen=True)
class Batches:
    """Sequences per rank and micro-step, and micro-steps per optimizer step."""

    micro: int
    accumulation: int


def plan_batches(config: Mapping[str, Any], ranks: int, changes: list[str]) -> Batches:
    """Batch sizes for `ranks`; differences from the config are added to `changes`.

    Raises:
        ConfigError: no number of ranks fits the config's batch sizes, or the config has none.
    """
    total = count_in(config, "train_batch_size")
    given = count_in(config, "train_micro_batch_size_per_gpu")
    steps = count_in(config, "gradient_accumulation_steps")
    step = (given or 1) * (steps or 1)
    if total is not None and total % step:
        raise ConfigError(
            f"train_batch_size {total} is not a multiple of train_micro_batch_size_per_gpu x "
            f"gradient_accumulation_steps = {given or 1} x {steps or 1}, so no number of ranks "
            "fits: change one of them"
        )
    if total is None and given is None and "auto" not in _sizes(config):
        raise ConfigError(
            "DeepSpeed needs train_batch_size or train_micro_batch_size_per_gpu: set one of them"
        )
    micro = given or (AUTO_MICRO if total is None else max(1, total // (ranks * (steps or 1))))
    accumulation = steps or (
        1 if total is None or given is None else max(1, total // (ranks * micro))
    )
    found = Batches(min(micro, MOST_MICRO), min(accumulation, MOST_ACCUMULATION))
    if total is not None and total != found.micro * found.accumulation * ranks:
        changes.append(
            f"train_batch_size {found.micro * found.accumulation * ranks} "
            f"in place of {total}, for {counted(ranks, 'rank')}"
        )
    for name, before, after in (
        ("train_micro_batch_size_per_gpu", given, found.micro),
        ("gradient_accumulation_steps", steps, found.accumulation),
    ):
        if config.get(name) == "auto" or (before is not None and before != after):
            changes.append(f"{name}: {after} in place of {config[name]}")
    return found


def _sizes(config: Mapping[str, Any]) -> list[Any]:
    return [config.get(name) for name in ("train_batch_size", "train_micro_batch_size_per_gpu")]
