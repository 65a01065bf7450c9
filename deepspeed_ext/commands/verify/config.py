"""Turns a user's DeepSpeed config into the config of the check, and lists the changes. Pure."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from deepspeed_ext.commands.verify.batches import Batches, plan_batches
from deepspeed_ext.config import ZenFlowConfig
from deepspeed_ext.config.file import section_of
from deepspeed_ext.errors import ConfigError
from deepspeed_ext.zenflow.plan.selective import SelectiveSettings
from deepspeed_ext.zenflow.rules.predictive.schedule import WARM_UP_STEPS

__all__ = ["Plan", "Rule", "plan_check"]

FEWEST_STEPS, MOST_DEFAULT_STEPS = 12, 96
TRAINERS_ADAMW = {"lr": 5e-5, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.0}
"""Defaults that the Hugging Face Trainer fills in for "auto"."""

WRITES_ELSEWHERE = (
    "tensorboard",
    "wandb",
    "csv_monitor",
    "comet",
    "flops_profiler",
    "comms_logger",
    "autotuning",
)
"""Sections that write outside the check's own folder."""
OF_THE_JOB = (
    "elasticity",
    "nebula",
    "curriculum_learning",
    "data_efficiency",
    "compression_training",
    "eigenvalue",
    "progressive_layer_drop",
    "tensor_parallel",
    "sequence_parallel_size",
    "pipeline",
)
"""Sections about the user's data, model or cluster, which do not apply to the small model."""
QUIET = {
    "steps_per_print": 10**9,
    "wall_clock_breakdown": False,
    "memory_breakdown": False,
    "dump_state": False,
}

DTYPES = {"fp16": "float16", "bf16": "bfloat16", "bfloat16": "bfloat16", "fp32": "float32"}
AUTOCAST_DTYPES = {
    **DTYPES,
    "float16": "float16",
    "half": "float16",
    "float32": "float32",
    "float": "float32",
}
ELEMENTWISE = ("SGD", "RMSprop", "Adagrad", "NAdam", "RAdam", "Adamax")
"""torch optimizers whose result does not depend on how parameters are partitioned."""

Rule = Literal["exact", "predicted", "deferred"]
"""How the weights follow the optimizer. exact: each step's weights are those of plain ZeRO.
predicted: they anticipate an update in flight (the predictive rule). deferred: some parameters wait
for several steps (ZenFlow as published)."""


@dataclass(frozen=True)
class Plan:
    """The plan of a check, sent to the ranks as JSON.

    Attributes:
        config: the config for ``deepspeed.initialize``.
        upstream: train with stock DeepSpeed, without this package.
        save_after: the step after which the checkpoint is saved.
        batches: the batches of a rank in a step.
        dtype: dtype of the weights.
        autocast: dtype of ``torch_autocast``; None: off.
        communication: dtype in which gradients are reduced.
        optimizer: type and arguments of the torch optimizer to compare with; None: there is none.
        why_no_optimizer: why there is none.
        rule: how the weights follow the optimizer.
        interval: steps per hand-over to the optimizer process; None: chosen while it runs.
        has_worker: whether there is an optimizer process.
        rounds_on_resume: whether the optimizer is DeepSpeed's CPU Adam, whose resumed runs differ
            in the last bits: it multiplies its bias corrections up at each step, but recomputes
            them after loading.
        flat_model: whether no parameter of the model has more than two dimensions.
        summary: the config in a few words.
        changes: differences from the user's config.
    """

    config: dict[str, Any]
    upstream: bool
    ranks: int
    steps: int
    save_after: int
    batches: Batches
    dtype: str
    autocast: str | None
    communication: str
    optimizer: tuple[str, dict[str, Any]] | None
    why_no_optimizer: str
    rule: Rule
    interval: int | None
    has_worker: bool
    rounds_on_resume: bool
    flat_model: bool
    summary: str
    changes: tuple[str, ...]

    @property
    def longest_interval(self) -> int:
        """`interval`, or the longest that may be chosen."""
        return self.interval or 1

    @property
    def has_coded_moments(self) -> bool:
        """Whether the moments are 8-bit codes."""
        return (
            section_of(section_of(self.config, "zero_optimization"), "zenflow").get("state_dtype")
            == "int8"
        )

    @property
    def has_rounded_masters(self) -> bool:
        """Whether each weight follows from its own master; false if only some weights step, or if
        weights are quantized."""
        quantized = section_of(self.config, "zero_optimization").get("zero_quantized_weights")
        return self.rule != "deferred" and not quantized


def plan_check(
    user: Mapping[str, Any], ranks: int, steps: int | None, upstream: bool, scratch: str
) -> Plan:
    """Plan the check of a config.

    Args:
        steps: optimizer steps; None: enough for the rule.
        upstream: plan the check without this package.
        scratch: folder for files that DeepSpeed writes because of the config.

    Raises:
        ConfigError: the config contradicts itself, or leaves out what DeepSpeed needs.
    """
    config, changes = copy.deepcopy(dict(user)), list[str]()
    for name in [name for name in (*WRITES_ELSEWHERE, *OF_THE_JOB) if name in config]:
        del config[name]
        changes.append(f"{name} is left out")
    config |= QUIET
    dtype = _dtype(config, changes)
    batches = plan_batches(config, ranks, changes)
    config.pop("train_batch_size", None)
    config |= {
        "train_micro_batch_size_per_gpu": batches.micro,
        "gradient_accumulation_steps": batches.accumulation,
    }
    zero = section_of(config, "zero_optimization")
    rule, interval, has_worker, warm_up = _zenflow(zero, upstream)
    if not upstream and rule != "exact":
        warm_up = _shorten_warm_up(zero["zenflow"], interval, warm_up, steps, changes)
    steps = steps or _enough_steps(rule, interval, warm_up)
    save_after = min(steps - 1, steps // 2 | 1)
    _fill_optimizer(config, steps, changes)
    _keep_inside(config, scratch, changes)
    _drop_auto(config, "", changes)
    optimizer, why = _plain_optimizer(config)
    flat = upstream and rule == "deferred"
    if flat:
        changes.append("no parameter has three dimensions: DeepSpeed's own ZenFlow fails on them")
    return Plan(
        config=config,
        upstream=upstream,
        ranks=ranks,
        steps=steps,
        save_after=save_after,
        batches=batches,
        dtype=dtype,
        autocast=_autocast(config),
        communication=DTYPES.get(str(config.get("communication_data_type")).lower(), dtype),
        optimizer=optimizer,
        why_no_optimizer=why,
        rule=rule,
        interval=interval,
        has_worker=has_worker,
        rounds_on_resume=_has_cpu_adam(config) and (upstream or not has_worker),
        flat_model=flat,
        summary=_summary(config, dtype, rule, interval, upstream),
        changes=tuple(changes),
    )


def _dtype(config: dict[str, Any], changes: list[str]) -> str:
    """The dtype of the weights; resolves "auto"."""
    sections = {
        name: dict(section_of(config, name))
        for name in ("bf16", "bfloat16", "fp16")
        if name in config
    }
    on = [name for name, section in sections.items() if section.get("enabled") is True]
    for name, section in sections.items():
        if section.get("enabled") == "auto":
            section["enabled"] = not on
            on = on or [name]
            changes.append(f"{name}.enabled: {str(section['enabled']).lower()} in place of auto")
            config[name] = section
    return DTYPES[on[0]] if on else "float32"


def _autocast(config: Mapping[str, Any]) -> str | None:
    """The dtype of ``torch_autocast``; None if it is off."""
    section = section_of(config, "torch_autocast")
    if not section.get("enabled"):
        return None
    name = str(section.get("dtype", "bfloat16")).removeprefix("torch.")
    if name not in AUTOCAST_DTYPES:
        raise ConfigError(f"torch_autocast.dtype: expected bfloat16 or float16, got {name[:40]}")
    return AUTOCAST_DTYPES[name]


def _zenflow(zero: Mapping[str, Any], upstream: bool) -> tuple[Rule, int | None, bool, int]:
    """Rule, interval, whether there is an optimizer process, and steps of its warm-up."""
    section = zero.get("zenflow")
    if section in (None, "auto"):
        return "exact", 1, False, 0
    if not isinstance(section, dict):
        raise ConfigError(
            f"zero_optimization.zenflow is a {type(section).__name__}, expected an object"
        )
    if upstream:
        interval = section.get("update_interval")
        return (
            "deferred",
            interval if isinstance(interval, int) else None,
            section.get("overlap_step") is True,
            1,
        )
    zenflow = ZenFlowConfig(**section)
    warm_up = zenflow.warm_up_steps
    if zenflow.rule == "selective":
        return "deferred", SelectiveSettings.of(zenflow).interval, True, warm_up or 1
    if not zenflow.overlapped:
        return "exact", 1, True, 0
    if warm_up is None:
        warm_up = WARM_UP_STEPS
    return "predicted", zenflow.interval, True, warm_up


def _shorten_warm_up(
    zenflow: dict[str, Any],
    interval: int | None,
    warm_up: int,
    steps: int | None,
    changes: list[str],
) -> int:
    """Limit the warm-up to five intervals if `steps` end too soon after it; return its number of
    steps."""
    shorter = 5 * (interval or 1)
    if warm_up <= shorter or (steps or 0) >= warm_up + 4 * (interval or 1):
        return warm_up
    zenflow["full_warm_up_rounds"] = shorter
    changes.append(
        f"zenflow.full_warm_up_rounds: {shorter} instead "
        f"of {warm_up}, so that there are steps after it"
    )
    return shorter


def _enough_steps(rule: Rule, interval: int | None, warm_up: int) -> int:
    """Enough steps to see the rule at work: its warm-up and some intervals."""
    if rule == "exact":
        return FEWEST_STEPS
    if interval is None:  # chosen at the first selection
        return 40
    wanted = warm_up + (4 if rule == "predicted" else 6) * interval
    return min(MOST_DEFAULT_STEPS, max(FEWEST_STEPS, wanted))


def _fill_optimizer(config: dict[str, Any], steps: int, changes: list[str]) -> None:
    """Give optimizer, schedule and clipping the values that a trainer would fill in."""
    section = section_of(config, "optimizer")
    if not section:
        # torch's, as the Trainer passes it; under offload Accelerate makes it DeepSpeed's CPU Adam
        config["optimizer"] = {
            "type": "AdamW",
            "params": TRAINERS_ADAMW | {"torch_adam": not _offloads_optimizer(config)},
        }
        changes.append(f"the config has no optimizer: AdamW with lr {TRAINERS_ADAMW['lr']:g}")
    elif not isinstance(section.get("type"), str):
        raise ConfigError(
            f"optimizer.type: expected a name, such as AdamW, got {str(section.get('type'))[:40]}"
        )
    params = section_of(config["optimizer"], "params")
    _fill(params, TRAINERS_ADAMW, "optimizer.params", changes)
    schedule = {
        "warmup_min_lr": 0.0,
        "warmup_max_lr": params.get("lr", 1e-3),
        "warmup_num_steps": 0,
    }
    _fill(
        section_of(section_of(config, "scheduler"), "params"),
        {**schedule, "total_num_steps": steps},
        "scheduler.params",
        changes,
    )
    _fill(config, {"gradient_clipping": 1.0}, "", changes)


def _fill(
    section: dict[str, Any], values: Mapping[str, Any], where: str, changes: list[str]
) -> None:
    for name, value in values.items():
        if section.get(name) == "auto":
            section[name] = value
            changes.append(f"{'.'.join(filter(None, [where, name]))}: {value} in place of auto")


def _keep_inside(config: dict[str, Any], scratch: str, changes: list[str]) -> None:
    """Make DeepSpeed write to `scratch` only, and load no files of the user."""
    zero = section_of(config, "zero_optimization")
    for name in ("offload_param", "offload_optimizer"):
        section = section_of(zero, name)
        if section.get("device") == "nvme":
            section["nvme_path"] = scratch
            changes.append(f"{name}.nvme_path is a temporary folder")
    checkpoint = section_of(config, "checkpoint")
    if checkpoint.pop("load_universal", None):
        changes.append("checkpoint.load_universal is left out")


def _drop_auto(section: dict[str, Any], where: str, changes: list[str]) -> None:
    """Remove every value that is still "auto", so that DeepSpeed's defaults apply."""
    for name in list(section):
        if section[name] == "auto":
            del section[name]
            changes.append(f"{where}{name}: DeepSpeed's default in place of auto")
        elif isinstance(section[name], dict):
            _drop_auto(section[name], f"{where}{name}.", changes)


def _plain_optimizer(config: Mapping[str, Any]) -> tuple[tuple[str, dict[str, Any]] | None, str]:
    """The equivalent torch optimizer, or None and the reason."""
    section = section_of(config, "optimizer")
    name, params = str(section.get("type", "")), dict(section_of(section, "params"))
    low = [
        part
        for part in ("bf16", "fp16")
        if section_of(config, part).get(f"{part}_master_weights_and_grads")
    ]
    if low:
        return None, f"{low[0]}_master_weights_and_grads has no plain optimizer to compare with"
    if name in ELEMENTWISE:
        return (name, params), ""
    if name.lower() not in ("adam", "adamw"):
        return None, f"torch has no {name} that could be compared with"
    if params.get("bias_correction") is False:
        return None, "torch has no Adam without bias correction"
    decoupled = bool(params.get("adam_w_mode", True)) or name.lower() == "adamw"
    # Without a value in the config, DeepSpeed's own Adams decay by 0, torch's AdamW by 0.01.
    own: dict[str, Any] = {} if params.get("torch_adam") else {"weight_decay": 0.0}
    kept: dict[str, Any] = {
        name: params[name]
        for name in ("lr", "betas", "eps", "weight_decay", "amsgrad")
        if name in params
    }
    try:
        if not all(
            math.isfinite(float(kept.get(name, 0.0))) for name in ("lr", "eps", "weight_decay")
        ):
            raise ValueError
    except (TypeError, ValueError):
        raise ConfigError(f"optimizer.params: expected numbers, got {params}") from None
    return ("AdamW" if decoupled else "Adam", {**own, **kept}), ""


def _has_cpu_adam(config: Mapping[str, Any]) -> bool:
    optimizer = section_of(config, "optimizer")
    adam = str(optimizer.get("type", "")).lower() in ("adam", "adamw")
    return (
        adam
        and _offloads_optimizer(config)
        and section_of(optimizer, "params").get("torch_adam") is not True
    )


def _offloads_optimizer(config: Mapping[str, Any]) -> bool:
    offload = section_of(section_of(config, "zero_optimization"), "offload_optimizer")
    return offload.get("device", "none") != "none"


def _summary(
    config: Mapping[str, Any], dtype: str, rule: Rule, interval: int | None, upstream: bool
) -> str:
    zero = section_of(config, "zero_optimization")
    offload = section_of(zero, "offload_optimizer").get("device", "none")
    parts = [
        f"stage {zero.get('stage', 0)}",
        dtype,
        str(section_of(config, "optimizer").get("type")),
    ]
    if "zenflow" in zero:
        name = "DeepSpeed's own ZenFlow" if upstream else "ZenFlow"
        how = {
            "exact": "no overlap",
            "predicted": "predictive rule",
            "deferred": "deferred updates",
        }[rule]
        parts.append(f"{name} ({how}, interval {interval or 'measured'})")
    elif offload != "none":
        parts.append(f"optimizer on {offload}")
    return ", ".join(parts) + (", stock DeepSpeed" if upstream else "")
