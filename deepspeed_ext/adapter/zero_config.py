"""DeepSpeed's config and its ``zero_optimization`` section with our fields; reports each mistake in
one line.

`require_supported` refuses combinations that ZenFlow does not support, before anything is changed.
`zenflow.optimizers` checks the user's optimizer.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, get_args

from pydantic import BaseModel, PrivateAttr, ValidationError, field_validator, model_validator
from typing_extensions import Self

from deepspeed_ext.adapter.upstream import (
    DeepSpeedConfig,
    DeepSpeedZenFlowConfig,
    DeepSpeedZeroConfig,
    DeepSpeedZeroOffloadOptimizerConfig,
    OffloadDeviceEnum,
    Swap,
    pins_offload_buffers,
    swapped,
)
from deepspeed_ext.config import ZenFlowConfig, ZeroFields, given_of_the_other_rule
from deepspeed_ext.config.file import read_json, require_fields, shown
from deepspeed_ext.errors import ConfigError
from deepspeed_ext.zenflow.plan.facts import Ratio
from deepspeed_ext.zenflow.plan.rule import limits_of
from deepspeed_ext.zenflow.worker.kernel.passes import LARGEST_BLOCK


class ZenFlowSection(ZenFlowConfig, DeepSpeedZenFlowConfig):
    """Our ``zenflow`` section, also an instance of DeepSpeed's class for code that checks the
    type."""

    @model_validator(mode="after")
    def validate_fields(self) -> Self:
        """Skip DeepSpeed's check: our types cover it, and it rejects fields that are None."""
        return self


class OffloadOptimizerSection(DeepSpeedZeroOffloadOptimizerConfig):
    """DeepSpeed's ``offload_optimizer`` section, in which ``ratio`` may be "auto" or its synonym
    "fit": Accelerate rejects an "auto" that it does not fill in itself."""

    _chooses_ratio: bool = PrivateAttr(False)

    def __init__(self, **data: Any) -> None:
        chooses_ratio = data.get("ratio") in ("auto", "fit")
        super().__init__(
            **{name: value for name, value in data.items() if name != "ratio" or not chooses_ratio}
        )
        self._chooses_ratio = chooses_ratio

    @property
    def host_ratio(self) -> Ratio:
        """`ratio`; None: not given."""
        if self._chooses_ratio:
            return "auto"
        return self.ratio if "ratio" in self.model_fields_set else None


class ZeroConfig(ZeroFields, DeepSpeedZeroConfig):
    """DeepSpeed's ``zero_optimization`` section with our fields.

    `Engine`, not this class, rejects unsupported combinations, so tools can read any config.

    Raises:
        ConfigError: one of our fields has an invalid value, a field is unknown to both, or two
            fields contradict each other.
    """

    zenflow: ZenFlowSection | None = None
    offload_optimizer: OffloadOptimizerSection | None = None

    @field_validator("offload_optimizer", mode="before")
    @classmethod
    def _with_our_fields(cls, section: Any) -> Any:
        """Convert the section that DeepSpeed builds from its deprecated ``cpu_offload``."""
        is_deepspeeds = isinstance(section, DeepSpeedZeroOffloadOptimizerConfig)
        return OffloadOptimizerSection(**section.model_dump()) if is_deepspeeds else section

    @model_validator(mode="after")
    def offload_ratio_check(self) -> Self:
        """With ZenFlow, allow a ratio below 1 at stages 1 and 2, too."""
        return self if self.zenflow is not None else super().offload_ratio_check()

    @property
    def host_ratio(self) -> Ratio:
        """The share of the optimizer on the host with ZenFlow; None: not given. 1 with CPU offload
        of the weights, and given with a rule that has no share (`RuleSettings.limits`)."""
        offload, weights = self.offload_optimizer, self.offload_param
        given = None if offload is None else offload.host_ratio
        has_none = self.zenflow is not None and limits_of(self.zenflow)
        is_one = (weights is not None and weights.device == "cpu") or (
            given is not None and has_none
        )
        return 1.0 if is_one else given

    def zenflow_with(self, bf16_optimizer_states: bool) -> ZenFlowConfig | None:
        """The ``zenflow`` section, given DeepSpeed's ``bf16.bf16_optimizer_states``, which a rule
        that keeps fp32 moments ignores."""
        section = self.zenflow
        if section is None or not bf16_optimizer_states or limits_of(section):
            return section
        return section.with_bf16_moments()

    def __init__(self, **data: Any) -> None:
        try:
            super().__init__(**data)
        except ValidationError as error:
            if message := self._explain(error):
                raise ConfigError(message) from None  # it contains all of pydantic's message
            raise
        if message := self._contradictions():
            raise ConfigError(message)

    @classmethod
    def _explain(cls, error: ValidationError) -> str:
        """One line per mistake in our fields or in a field name; empty if DeepSpeed's own checks
        report the mistakes."""
        lines: dict[str, list[str]] = {}
        sections = _sections(cls)
        for mistake in error.errors():
            place = [str(part) for part in mistake["loc"]]
            # without the branch of its type that pydantic appends
            while place and tuple(place[:-1]) not in sections:
                place.pop()
            path, value = ".".join(["zero_optimization", *place]), shown(mistake["input"])
            # DeepSpeed has this section too, and reports it itself
            whole_section = place in (["zenflow"], [])
            if mistake["type"] == "extra_forbidden":
                hint = cls._meant(place) or "; remove it or see docs/config_reference.md"
                lines[f"{path} is not a field (its value was {value}){hint}"] = []
            elif not whole_section and place[0] in ZeroFields.model_fields:
                lines.setdefault(f"{path} = {value}", []).append(mistake["msg"])
        found = [f"{what}: {', or '.join(why)}" if why else what for what, why in lines.items()]
        return "; ".join(found)

    @classmethod
    def _meant(cls, place: Sequence[str]) -> str:
        """Guess the field meant by an unknown name: one of the same section, otherwise of any
        section."""
        sections = _sections(cls)
        *section, name = place
        here = sections.get(tuple(section), ())
        elsewhere = {
            field: (*path, field) for path, fields in reversed(sections.items()) for field in fields
        }
        if close := difflib.get_close_matches(name, here, n=1):
            return f"; did you mean {close[0]!r}?"
        if close := difflib.get_close_matches(name, elsewhere, n=1):
            return f"; did you mean {'.'.join(('zero_optimization', *elsewhere[close[0]]))!r}?"
        return ""

    def idle(self, where: str, *, flattens: bool, gathers: bool, binds: bool) -> Iterator[str]:
        """One line per setting that the user gave and that has no effect.

        Args:
            where: ZeRO stage and optimizer, for the message.
            flattens: whether the optimizer builds flat buffers (ours for ZeRO-1/2).
            gathers: whether parameters are gathered (ZeRO-3).
            binds: whether core binding has started.
        """
        enabled = self.core_binding.enabled
        if "core_binding" in self.model_fields_set and not binds and enabled is not False:
            why = f"this run uses {where}" if enabled else "it is not enabled, nor is zenflow"
            yield f"zero_optimization.core_binding has no effect: {why}"
        matters = {
            "flatten_tier": flattens,
            "flatten_reserve_fraction": flattens,
            "stage3_allgather_single_param": gathers,
            "stage3_single_param_min_numel": gathers,
        }
        for field, needed in matters.items():
            if field in self.model_fields_set and not needed:
                yield f"zero_optimization.{field} has no effect: this run uses {where}"
        if (zenflow := self.zenflow) is None:
            return
        for field in given_of_the_other_rule(zenflow):
            yield (
                f"zero_optimization.zenflow.{field} has no effect: "
                f"this run uses the {zenflow.rule} update rule"
            )
        for field, meaning in zenflow.retired.items():
            yield f"zero_optimization.zenflow.{field} is retired: {meaning}"
        offload = self.offload_optimizer
        if offload is not None and offload.host_ratio not in (None, self.host_ratio):
            yield "zero_optimization.offload_optimizer.ratio has no effect: " + (
                limits_of(zenflow) or "with offload_param, the whole optimizer is on the host"
            )

    def _contradictions(self) -> str:
        """One line per pair of contradicting settings."""
        if self.host_ratio == "auto" and self.zenflow is None:
            return (
                'zero_optimization.offload_optimizer.ratio = "auto" (or "fit") needs '
                "zero_optimization.zenflow: give a number, or add that section"
            )
        rivals = {
            "stage3_allgather_sequential": self.allgather_sequential,
            "stage3_use_all_reduce_for_fetch_params": self.use_all_reduce_for_fetch_params,
        }
        return "; ".join(
            f"zero_optimization.stage3_allgather_single_param = True and {rival} = True exclude "
            "each other; set one of them to false"
            for rival, is_set in rivals.items()
            if is_set and self.stage3_allgather_single_param
        )


_BF16_STATES = "bf16.bf16_optimizer_states"
_FP32 = "ZenFlow keeps p in fp32, which takes 2 more bytes per parameter"

REPLACED = {
    "zero_optimization.offload_optimizer.super_offload": (
        "ZenFlow's optimizer process takes its place"
    ),
    "zero_optimization.elastic_checkpoint": (
        "a checkpoint of any number of ranks is loaded without it"
    ),
    "zero_optimization.pipeline_loading_checkpoint": (
        "all ranks load at once, and map their files to read only what they need"
    ),
    "bf16.bf16_master_weights_and_grads": _FP32,
    "fp16.fp16_master_weights_and_grads": _FP32,
    _BF16_STATES: "zenflow.state_dtype says float32, or this rule keeps m and v in fp32",
}
"""Settings that ZenFlow replaces with something at least as good, each with that replacement."""


class Config(DeepSpeedConfig):
    """DeepSpeed's config, without the checks for DeepSpeed's own ZenFlow.

    Raises:
        ConfigError: the file cannot be read, or ``zero_optimization`` or a section of it is not an
            object with string keys.
    """

    zero_config: Any
    bfloat16_config: Any
    float16_config: Any

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        is_file = isinstance(config, str) and os.path.exists(config)  # DeepSpeed also takes base64
        given = read_json(config, "config") if is_file else config
        if isinstance(given, Mapping):
            require_fields(given)
        super().__init__(config, *args, **kwargs)

    def _do_error_check(self) -> None:
        zero_config = self.zero_config
        if not isinstance(zero_config, ZeroConfig):
            super()._do_error_check()
            return
        with swapped(Swap(self, "zero_config", zero_config.model_copy(update={"zenflow": None}))):
            super()._do_error_check()

    def settle(self) -> list[str]:
        """Turn on the CPU offload that ``zenflow`` implies, take torch's Adam unless the config
        forbids it, and turn off what ours replaces; return the keys of `REPLACED` that were on.

        An engine that uses the section calls this before DeepSpeed reads the config.
        """
        zero, bf16 = self.zero_config, self.bfloat16_config
        offload = zero.offload_optimizer or OffloadOptimizerSection(pin_memory=False)
        zenflow, pins = zero.zenflow_with(bf16.bf16_optimizer_states), pins_offload_buffers(offload)
        sections = {
            "zero_optimization": zero,
            "zero_optimization.offload_optimizer": offload,
            "bf16": bf16,
            "fp16": self.float16_config,
        }
        found = []
        for name in REPLACED:
            section, _, field = name.rpartition(".")
            if getattr(sections[section], field):
                found.append(name)
                sections[section] = sections[section].model_copy(update={field: False})
        zero, offload, self.bfloat16_config, self.float16_config = sections.values()
        implied = offload.model_copy(update={"device": OffloadDeviceEnum.cpu, "pin_memory": pins})
        changes = {"offload_optimizer": implied, "zenflow": zenflow}
        self.zero_config = zero.model_copy(update=changes)
        if "zero_force_ds_cpu_optimizer" not in self._param_dict:
            self.zero_force_ds_cpu_optimizer = False
        return [name for name in found if zenflow.keeps_exact_moments or name != _BF16_STATES]


def _sections(model: type[BaseModel]) -> dict[tuple[str, ...], list[str]]:
    """Field names of `model` and of every section in its annotations, by the path to the
    section."""
    found: dict[tuple[str, ...], list[str]] = {(): []}
    for name, field in model.model_fields.items():
        found[()] += [name, *([field.alias] if field.alias else [])]
        for kind in (field.annotation, *get_args(field.annotation)):
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                found |= {(name, *path): names for path, names in _sections(kind).items()}
    return found


# -- refusals --------------------------------------------------------------------------------------


def require_supported(
    section: Any,
    *,
    node_local_storage: bool = False,
    tensor_ranks: int = 1,
    ties_stages: bool = False,
    makes_experts: bool = False,
) -> None:
    """Check the ``zero_optimization`` section, and what DeepSpeed makes of the rest of the config:
    checkpoints on each node's storage, tensor-parallel ranks, parameters that stages of a pipeline
    share, and layers that AutoEP replaces.

    Raises:
        ConfigError: the section has ``zenflow`` together with settings that it does not support;
            names all of them.
    """
    if (zenflow := section.zenflow) is None:
        return
    limits, of_rule = limits_of(zenflow), f'update_rule = "{zenflow.rule}"'
    refused = _of_section(section, limits)
    if zenflow.async_save and node_local_storage:
        setting = "async_save = true with checkpoint.use_node_local_storage"
        refused[setting] = "all ranks must write to one folder"
    if limits and tensor_ranks > 1:
        refused[f"{of_rule} with {tensor_ranks} tensor-parallel ranks"] = limits
    if limits and ties_stages:
        refused[f"{of_rule} with layers that stages of a pipeline share"] = limits
    if makes_experts:
        refused["expert_parallel.enabled = true"] = (
            "AutoEP is not built; DeepSpeed's MoE layer works at stages 1 and 2, and experts that "
            "are not distributed work at any stage"
        )
    _refuse(refused)


def _of_section(section: Any, limits: str) -> dict[str, str]:
    """Settings of the section that cannot be combined with ZenFlow, each with why."""
    zenflow, refused = section.zenflow, dict[str, str]()
    if section.stage == 0:
        why = "DeepSpeed neither partitions nor offloads an optimizer at that stage"
        refused["stage = 0"] = why
    for name in ("offload_optimizer", "offload_param"):
        if getattr(getattr(section, name), "device", None) == "nvme":
            refused[f'{name}.device = "nvme"'] = "it is not built"
    refused |= zenflow.refused_moments(limits, LARGEST_BLOCK)
    if zenflow.gradients_on_host and section.offload_param is None:  # otherwise without effect
        if section.stage == 1:
            refused["gradients_on_host = true at stage 1"] = (
                "DeepSpeed keeps the whole gradient on the accelerator until it is reduced: use "
                "stage 2"
            )
        if (ratio := section.host_ratio) not in (None, 1.0):
            shown = '"auto" (or "fit")' if ratio == "auto" else f"{ratio:g}"
            setting = f"gradients_on_host = true with offload_optimizer.ratio = {shown}"
            refused[setting] = "what steps on the accelerator needs its gradients there"
    given = section.model_dump(include={"compute_grad_norm", "mics_shard_size"})
    if given.get("compute_grad_norm") is False:  # a field since DeepSpeed 0.19.7
        refused["compute_grad_norm = false"] = "DeepSpeed refuses it with CPU offload"
    if (given.get("mics_shard_size") or 0) > 0:  # a field until DeepSpeed 0.19.6
        why = "DeepSpeed has an optimizer of its own for it; zero_hpz_partition_size divides alike"
        refused["mics_shard_size"] = why
    return refused


def require_compilable(is_deepcompile: bool, is_autograd_compiled: bool) -> None:
    """Check what ``engine.compile`` is asked for, before the model is compiled: by the config's
    ``compile.deepcompile``, and by the argument ``compiled_autograd_enabled``.

    Raises:
        ConfigError: either is on.
    """
    refused = {}
    if is_autograd_compiled:
        refused["engine.compile with compiled_autograd_enabled=True"] = (
            "a compiled backward pass cannot queue the callback that completes the gradients"
        )
    if is_deepcompile:
        refused["engine.compile() with compile.deepcompile"] = (
            "it removes the hooks that give an offloaded optimizer its gradients, so ZeRO-Offload "
            "does not train with it either"
        )
    _refuse(refused, "leave it out, and engine.compile() compiles the model with torch.compile")


def _refuse(
    refused: Mapping[str, str], remedy: str = "remove that setting or the zenflow section"
) -> None:
    if refused:
        found = " and ".join(f"{setting} ({why})" for setting, why in refused.items())
        raise ConfigError(f"zero_optimization.zenflow does not support {found}: {remedy}")
