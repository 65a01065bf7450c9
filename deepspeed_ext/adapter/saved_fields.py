"""Checks what DeepSpeed takes from a checkpoint's files as it stands: counts, the loss scale, the
clipping norm, p, the optimizer's state and the state of the learning rate's schedule.

DeepSpeed assigns them unseen, so that a wrong one trains badly or fails steps later. Fields that
are not listed are not checked: users keep their own in the model's file.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from numbers import Real
from typing import Any

import numpy as np
import torch

from deepspeed_ext.adapter.saved_checkpoint import Keys, SavedPartitions
from deepspeed_ext.adapter.upstream import DynamicLossScaler, LossScalerBase
from deepspeed_ext.checkpoint.reshard.ends import MASTER
from deepspeed_ext.errors import CheckpointError
from deepspeed_ext.runtime.words import LOAD_ANOTHER

__all__ = [
    "require_model_fields",
    "require_optimizer_fields",
    "require_partitions",
    "require_weights",
]

_ANOTHER = LOAD_ANOTHER.capitalize()
_OR_NO_SCHEDULE = f"{_ANOTHER}, or pass load_lr_scheduler_states=False"
Field = tuple[Callable[[Any], bool], str]
"""Whether a value is right, and the words for what is."""


def require_optimizer_fields(state: Any, where: str) -> None:
    """Check an optimizer's state dict of any ZeRO stage.

    Args:
        where: what holds it, such as a file.

    Raises:
        CheckpointError: a field is missing, or is not what DeepSpeed needs there.
    """
    if not isinstance(state, Mapping):
        where = f"{where}: its {Keys.OPTIMIZER_STATE_DICT}"
    _require(state, _OPTIMIZER, _needed_by_optimizer(state), where)
    scaler = state.get(Keys.LOSS_SCALER)
    if scaler is not None:
        fields = {**_SCALER, **(_DYNAMIC if isinstance(scaler, DynamicLossScaler) else {})}
        _require(vars(scaler), fields, fields.keys() & {"cur_scale"}, f"{where}: its loss_scaler")


def require_partitions(
    saved: SavedPartitions,
    moments: Sequence[str],
    numels: Sequence[int] | None = None,
    paddings: Sequence[Sequence[int]] | None = None,
) -> None:
    """Check p and the optimizer's state of one rank.

    Args:
        moments: names of the moments that the run takes, all or none.
        numels: elements of the run's partitions, in order; None: those of p. Without the padding at
            its end, p of stages 1 and 2 has fewer.
        paddings: elements behind each parameter of each group in the run; None: not compared.

    Raises:
        CheckpointError: one is missing, or does not fit.
    """
    behind = saved.state.get(Keys.GROUP_PADDINGS) or [0] * len(saved.entries)
    if numels is None:
        parts = zip(saved.tensors, behind, strict=True)
        numels = [tensors[MASTER].numel() + padding for tensors, padding in parts]
    if len(saved.entries) != len(numels):
        raise CheckpointError(
            f"{saved.path} has {len(saved.entries)} partitions, expected {len(numels)}. {_ANOTHER}"
        )
    if paddings is not None:
        aligned: Field = (
            lambda value: _equals(value, paddings),
            ("what this run's zero_optimization.parameter_alignment makes"),
        )
        _require(saved.state, {Keys.PARAM_ALIGNMENT_PADDINGS: aligned}, (), saved.path)
    for index, (numel, padding) in enumerate(zip(numels, behind, strict=True)):
        sizes, where = {numel, numel - padding}, f"{saved.path}: partition {index}"
        flat: Field = partial(_is_flat, sizes=sizes), f"a tensor of {numel} floats"
        _require({MASTER: saved.masters[index]}, {MASTER: flat}, (), where)
        if not (entry := saved.entries[index]):
            continue
        if saved.groups and "step" in (group := saved.groups[saved.group_of_flats[index]]):
            entry = {"step": group["step"], **entry}  # where fused optimizers keep it
        _require(entry, {**dict.fromkeys(moments, flat), "step": _COUNT}, (*moments, "step"), where)


def require_model_fields(
    content: Mapping[str, Any], where: str, *, loads_counts: bool, schedule: Any
) -> None:
    """Check the content of a model's file.

    Args:
        where: the file.
        loads_counts: whether DeepSpeed will take more than the weights.
        schedule: the learning rate's scheduler that will take its state from there; None: none.

    Raises:
        CheckpointError: a field is missing, or is not what DeepSpeed needs there.
    """
    _require(content, _MODEL, _COUNTS if loads_counts else ("dp_world_size",), where)
    if (library := _loaded_by(schedule)) not in _NEEDED_BY_SCHEDULE:
        return  # a scheduler that loads itself may have saved anything
    if (state := content.get("lr_scheduler")) is None:
        raise CheckpointError(
            f"{where} was saved without a learning rate scheduler, and this run has one: pass "
            "load_lr_scheduler_states=False, or resume without a scheduler"
        )
    needed, where = _NEEDED_BY_SCHEDULE[library], f"{where}: its lr_scheduler"
    _require(state, _SCHEDULE, needed, where, _OR_NO_SCHEDULE)


def require_weights(
    where: str, content: Mapping[str, Any] | None, module: torch.nn.Module, *, strict: bool
) -> None:
    """Check the weights that torch loads into `module`. Modules that load themselves, or have hooks
    on loading, may take anything.

    Args:
        where: the file.
        content: of the file; None: there is none.
        strict: whether the names must be equal.

    Raises:
        CheckpointError: a weight is missing, or does not fit.
    """
    if content is None:
        return
    if (frozen := content.get(Keys.FROZEN_PARAM_FRAGMENTS)) is not None:
        mine = {
            name: getattr(param, "ds_tensor", param)
            for name, param in module.named_parameters()
            if not param.requires_grad
        }
        _require(frozen, _like(mine), mine, f"{where}: its {Keys.FROZEN_PARAM_FRAGMENTS}")
    if any(map(_loads_itself, module.modules())):
        return
    saved: Any = content.get("module")
    here = dict(_kept(module))
    _require(saved, {}, (), f"{where}: its module")
    unknown = [name for name in saved.keys() - here if not str(name).endswith(_EXTRA)]
    if strict and (unknown or here.keys() - saved):
        raise CheckpointError(
            f"{where}: the model differs from the checkpoint's: missing in the checkpoint: "
            f"{sorted(here.keys() - saved)}, unknown to the model: {sorted(map(str, unknown))}. "
            "Resume with the model that was saved, or pass load_module_strict=False"
        )
    _require(saved, _like(here), (), f"{where}: its module")


def _like(weights: Mapping[str, torch.Tensor]) -> Mapping[str, Field]:
    return {name: (partial(_is_like, like=each), _shown(each)) for name, each in weights.items()}


_EXTRA = "_extra_state"
"""End of the name of what is no tensor in torch's state dicts."""


def _loads_itself(module: torch.nn.Module) -> bool:
    """Whether other code than torch's decides what is loaded, or what may be missing."""
    names = ("load_state_dict", "_load_from_state_dict")
    is_torch = all(vars(torch.nn.Module)[name] is getattr(type(module), name) for name in names)
    is_plain = is_torch and not vars(module).keys() & {*names}
    hooks = {**module._load_state_dict_pre_hooks, **module._load_state_dict_post_hooks}
    return not is_plain or bool(hooks)


def _kept(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a module's state dict, without a call of its hooks."""
    for prefix, each in module.named_modules(remove_duplicate=False):
        for name, value in (*each._parameters.items(), *each._buffers.items()):
            if value is not None and name not in each._non_persistent_buffers_set:
                yield f"{prefix}.{name}" if prefix else name, value


def _loaded_by(schedule: Any) -> str:
    """The package whose code loads a scheduler's state; empty: not known, or there is none."""
    module = getattr(getattr(schedule, "load_state_dict", None), "__module__", None)
    return str(module or "").partition(".")[0]


def _needed_by_optimizer(state: Any) -> tuple[str, ...]:
    """The keys that DeepSpeed requires."""
    if isinstance(state, Mapping) and Keys.FP32_FLAT_GROUPS in state:
        return (Keys.LOSS_SCALER, "dynamic_loss_scale", "overflow")
    return (Keys.DS_VERSION,)


def _require(
    found: Any,
    fields: Mapping[str, Field],
    needed: Any,
    where: str,
    remedy: str = _ANOTHER,
) -> None:
    if not isinstance(found, Mapping):
        raise CheckpointError(f"{where} is {_shown(found)}, expected a dict. {remedy}")
    for name, (is_right, expected) in fields.items():
        if name not in found:
            if name in needed:
                raise CheckpointError(f"{where} has no {name}, expected {expected}. {remedy}")
        elif not is_right(value := found[name]):
            raise CheckpointError(
                f"{where}: {name} is {_shown(value)}, expected {expected}. {remedy}"
            )


def _shown(value: Any) -> str:
    if isinstance(value, torch.Tensor) and value.numel() != 1:
        return f"a {tuple(value.shape)} tensor of {value.dtype}"
    value = _number(value)
    said = repr(value) if isinstance(value, (Real, str, bool)) or value is None else ""
    return f"{said[:60]} ({type(value).__name__})" if said else f"a {type(value).__name__}"


# -- kinds of values -------------------------------------------------------------------------------


def _number(value: Any) -> Any:
    """A plain number for a tensor or an array of one element, 1 if it has not been read; otherwise
    the value."""
    if isinstance(value, (torch.Tensor, np.ndarray, np.generic)) and math.prod(value.shape) == 1:
        return 1 if isinstance(value, torch.Tensor) and value.is_meta else value.item()
    return value


def _is_flat(value: Any, sizes: Collection[int]) -> bool:
    is_strided = isinstance(value, torch.Tensor) and value.layout == torch.strided
    return is_strided and value.is_floating_point() and value.ndim == 1 and value.numel() in sizes


def _is_like(value: Any, like: torch.Tensor) -> bool:
    """Whether torch copies the value to a weight, and keeps what it means."""
    if not isinstance(value, torch.Tensor):
        return False
    may_differ = not isinstance(like, torch.nn.Parameter)  # masks: numbers once, truths today
    kinds = {(each.is_floating_point(), each.is_complex()) for each in (value, like)}
    is_one = like.ndim == 0 and tuple(value.shape) == (1,)  # as torch before 0.4 saved scalars
    return (may_differ or len(kinds) == 1) and (value.shape == like.shape or is_one)


def _equals(value: Any, expected: Any) -> bool:
    try:
        return bool(value == expected)
    except (TypeError, ValueError, RuntimeError):  # an array or a tensor
        return False


def _is_truth(value: Any) -> bool:
    return isinstance(value := _number(value), bool) or (_is_count(value) and value <= 1)


def _is_count(value: Any, least: int = 0) -> bool:
    """Whether it is a whole number; a float may be one, as DeepSpeed takes it."""
    return _is_finite(value) and int(_number(value)) == _number(value) >= least


def _is_finite(value: Any) -> bool:
    value = _number(value)
    is_real = isinstance(value, Real) and not isinstance(value, bool)
    return is_real and -math.inf < value < math.inf


def _is_positive(value: Any) -> bool:
    return _is_finite(value) and _number(value) > 0


def _is_norm(value: Any) -> bool:
    value = _number(value)
    return _is_finite(value) or (isinstance(value, float) and value == math.inf)


def _is_version(value: Any) -> bool:
    return isinstance(value, str) and re.match(r"\d+\.\d", value) is not None


def _is_partition_count(value: Any) -> bool:
    return _is_count(value, 1) or (_are_counts(value, 1) and bool(value))


def _are_counts(value: Any, least: int = 0) -> bool:
    return isinstance(value, (list, tuple)) and all(_is_count(each, least) for each in value)


def _are_numbers(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        value = [1] if value.is_meta else value.tolist()
    return isinstance(value, (list, tuple)) and all(map(_is_finite, value))


_TRUTH: Field = _is_truth, "True or False"
_COUNT: Field = _is_count, "a whole number of at least 0"
_RANKS: Field = lambda value: _is_count(value, 1), "a whole number of at least 1"
_POSITION: Field = _is_finite, "a finite number"
_RATES: Field = _are_numbers, "a list of finite numbers"
_SCALE: Field = _is_positive, "a finite number above 0"

_OPTIMIZER: Mapping[str, Field] = {
    Keys.LOSS_SCALER: (
        lambda value: isinstance(value, LossScalerBase),
        "a loss scaler of DeepSpeed (deepspeed.runtime.fp16.loss_scaler)",
    ),
    "dynamic_loss_scale": _TRUTH,
    "overflow": _TRUTH,
    Keys.CLIP_GRAD: (_is_norm, "a number"),
    Keys.DS_VERSION: (_is_version, "the version of a DeepSpeed"),
    Keys.ZERO_STAGE: (lambda value: _is_count(value, 1) and value <= 3, "1, 2 or 3"),
    Keys.GROUP_PADDINGS: (_are_counts, "a list of whole numbers of at least 0"),
    Keys.PARAM_ALIGNMENT_PADDINGS: (
        lambda value: isinstance(value, (list, tuple)) and all(map(_are_counts, value)),
        "lists of whole numbers of at least 0",
    ),
    Keys.PARTITION_COUNT: (_is_partition_count, "a whole number of at least 1, or a list of these"),
}
_SCALER: Mapping[str, Field] = {"cur_scale": _SCALE, "dynamic": _TRUTH}
_DYNAMIC: Mapping[str, Field] = {
    "cur_iter": _COUNT,
    "last_overflow_iter": _POSITION,
    "scale_factor": _SCALE,
    "scale_window": _SCALE,
    "min_scale": (_is_finite, "a finite number"),
    "delayed_shift": _POSITION,
    "cur_hysteresis": _POSITION,
    "consecutive_hysteresis": _TRUTH,
    "raise_error_at_min_scale": _TRUTH,
}
_MODEL: Mapping[str, Field] = {
    "global_steps": _COUNT,
    "global_samples": _COUNT,
    "skipped_steps": _COUNT,
    "dp_world_size": _RANKS,
    "mp_world_size": _RANKS,
}
_COUNTS = ("global_steps", "skipped_steps", "dp_world_size", "mp_world_size")
"""What DeepSpeed requires of a model's file, besides the weights."""
_NEEDED_BY_SCHEDULE: Mapping[str, tuple[str, ...]] = {
    "torch": (),
    "deepspeed": ("last_batch_iteration",),
}
"""What a scheduler requires of its state, by the package that loads it."""
_SCHEDULE: Mapping[str, Field] = {
    "last_batch_iteration": _POSITION,
    "last_epoch": _POSITION,
    "_step_count": _POSITION,
    "base_lrs": _RATES,
    "_last_lr": _RATES,
}
