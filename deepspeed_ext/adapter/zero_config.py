"""DeepSpeed's config and its ``zero_optimization`` section with our fields; reports each mistake in
one line."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping, Sequence
from typing import Any, get_args

from pydantic import BaseModel, PrivateAttr, ValidationError, field_validator, model_validator
from typing_extensions import Self

from deepspeed_ext.adapter.upstream import (
    DeepSpeedConfig,
    DeepSpeedZenFlowConfig,
    DeepSpeedZeroConfig,
    DeepSpeedZeroOffloadOptimizerConfig,
    Swap,
    swapped,
)
from deepspeed_ext.config import ZenFlowConfig, ZeroFields
from deepspeed_ext.config.file import read_json, require_fields, shown
from deepspeed_ext.errors import ConfigError
from deepspeed_ext.zenflow.plan.facts import Ratio
from deepspeed_ext.zenflow.plan.rules import limits_of

__all__ = ["Config", "ZeroConfig"]


class ZenFlowSection(ZenFlowConfig, DeepSpeedZenFlowConfig):
    """Our ``zenflow`` section, also an instance of DeepSpeed's class for code that checks the
    type."""

    @model_validator(mode="after")
    def validate_fields(self) -> Self:
        """Skip DeepSpeed's check: our types cover it, and it rejects the interval "measured"."""
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

    def zenflow_with(self, bf16_optimizer_states: bool) -> ZenFlowSection | None:
        """The ``zenflow`` section, given DeepSpeed's ``bf16.bf16_optimizer_states``."""
        section = self.zenflow
        if section is None or not bf16_optimizer_states:
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
        for mistake in error.errors():
            place = cls._without_branches([str(part) for part in mistake["loc"]])
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
    def _without_branches(cls, place: list[str]) -> list[str]:
        """The path to a field, without the branch of its type that pydantic appends."""
        sections = _sections(cls)
        depth = next((n for n in range(len(place)) if tuple(place[:n]) not in sections), len(place))
        return place[:depth]

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


class Config(DeepSpeedConfig):
    """DeepSpeed's config, without the checks for DeepSpeed's own ZenFlow.

    Raises:
        ConfigError: the file cannot be read, or ``zero_optimization`` or a section of it is not an
            object with string keys.
    """

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
