"""The config that users write: what is accepted, what each mistake is called, and what is meant by
leaving fields out.

Reading a config needs no ranks and no engine; that an engine refuses one on all ranks is in
test_entry.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import deepspeed
import pytest
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.zenflow.zenflow_config import ZenFlowConfig as DeepSpeedZenFlowConfig
from deepspeed.runtime.zero import config as zero_config_module
from pydantic import TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

import deepspeed_ext
from deepspeed_ext.adapter.zero_config import Config, ZeroConfig, require_supported
from deepspeed_ext.config import (
    CoreBindingConfig,
    ReservedCores,
    ZenFlowConfig,
    ZeroFields,
    given_of_the_other_rule,
)
from deepspeed_ext.config.fields import OF_ONE_RULE, RETIRED
from deepspeed_ext.config.file import read_json
from deepspeed_ext.errors import ConfigError
from tests.support.config_models import models

OF_THE_SECTION = [(model, name) for model in models(ZeroFields) for name in model.model_fields]


@pytest.fixture
def _enabled() -> Iterator[None]:
    deepspeed_ext.enable()
    yield
    deepspeed_ext.disable()


def message_of(**zero: Any) -> str:
    with pytest.raises(ConfigError) as error:
        ZeroConfig(**zero)
    # Nothing is printed before it: not pydantic's own error, which says less.
    assert error.value.__suppress_context__ or error.value.__context__ is None
    assert error.value.__cause__ is None
    return str(error.value)


@pytest.mark.parametrize(
    ("config", "place"),
    [
        ({"zenflow": {}, "zero_optimization": {"stage": 2}}, "zenflow, at the top of the config,"),
        ({"zero_optimisation": {"zenflow": {"update_rule": "exact"}}}, "zero_optimisation.zenflow"),
        ({"Zero_Optimization": {"stage": 2, "zenflow": {}}}, "Zero_Optimization.zenflow"),
        ({"flatten_tier": "host"}, "flatten_tier, at the top of the config,"),
    ],
)
def test_a_field_that_stands_where_nothing_reads_it_is_refused(
    config: dict[str, Any], place: str
) -> None:
    """DeepSpeed ignores what it does not know there, and would train without it."""
    name = "flatten_tier" if "flatten_tier" in config else "zenflow"
    with pytest.raises(ConfigError) as error:
        Config({"train_batch_size": 1, **config})
    assert str(error.value) == f"{place} is read by nothing: move it to zero_optimization.{name}"


def test_sections_of_others_may_stand_beside_zero_optimization() -> None:
    own = {
        "notes": {"stage": 3, 7: "seven", "zenflow": {}},
        "run": "zenflow",
        "list": ["zenflow"],
        3: {},
    }
    read = Config({"train_batch_size": 1, "zero_optimization": {"stage": 2}, **own})
    assert read.zero_config.stage == 2


@pytest.mark.parametrize(
    ("zero", "says"),
    [
        ({"flaten_tier": "host"}, ["flaten_tier", "'host'", "mean 'flatten_tier'"]),
        ({"flatten_tier": "gpu"}, ["flatten_tier", "'gpu'", "'accelerator', 'distributed'"]),
        ({"flatten_reserve_fraction": 1.5}, ["flatten_reserve_fraction", "1.5", "less than 1"]),
        ({"flatten_reserve_fraction": "some"}, ["flatten_reserve_fraction", "'some'", "number"]),
        ({"core_binding": {"enable": True}}, ["core_binding.enable", "mean 'enabled'"]),
        (
            {"zenflow": {"prediction_error_factor": 0.5}},
            ["zenflow.prediction_error_factor", "0.5", "at least 1"],
        ),
        (
            {"zenflow": {"prediction_error_factor": -0.5}},
            ["zenflow.prediction_error_factor", "-0.5"],
        ),
        ({"zenflow": {"top_ratio": 0.1}}, ["zenflow.top_ratio", "mean 'topk_ratio'"]),
        ({"update_interval": 2}, ["update_interval", "mean 'zero_optimization.zenflow.update_i"]),
        ({"offload_optimizer": {"devise": "cpu"}}, ["offload_optimizer.devise", "mean 'device'"]),
        ({"zenflow": {"quite_another": 1}}, ["zenflow.quite_another", "docs/config_reference.md"]),
        ({"unknown": "x" * 10_000}, ["unknown", "xxx...xxx"]),
    ],
)
def test_a_mistake_names_field_value_and_what_was_meant(
    zero: dict[str, Any], says: list[str]
) -> None:
    message = message_of(**zero)
    assert len(message) < 300
    for part in (f"zero_optimization.{says[0]}", *says):
        assert part in message


def numbers_of(model: Any, name: str) -> list[Any]:
    """Values that a number may not have, if the field holds numbers."""
    field: FieldInfo = model.model_fields[name]
    kinds = str(field.annotation)
    found: list[Any] = []
    if "int" in kinds:
        found += [2**63, 2**64, 10**400, -(2**63)]
    if "float" in kinds:
        found += [float("inf"), float("-inf"), float("nan"), 1e20, -1e20]
    return found


@pytest.mark.parametrize(
    ("model", "name", "value"),
    [
        pytest.param(
            model, name, value, id=f"{name}-{str(value)[:6] if abs(value) < 1e300 else 'huge'}"
        )
        for model, name in OF_THE_SECTION
        for value in numbers_of(model, name)
    ],
)
def test_no_number_is_unbounded(model: Any, name: str, value: Any) -> None:
    sections = {CoreBindingConfig: "core_binding", ZenFlowConfig: "zenflow"}
    given = {sections[model]: {name: value}} if model in sections else {name: value}
    assert name in message_of(**given)


@pytest.mark.parametrize("model", models(ZeroFields), ids=lambda model: model.__name__)
def test_a_default_may_also_be_written(model: Any) -> None:
    """Who writes down what they get without a field, for example from a log, must not be
    refused."""
    assert model(**model().model_dump(exclude_none=True)) == model()


def test_the_wait_for_a_worker_ends_before_the_default_group_timeout() -> None:
    from deepspeed.constants import default_pg_timeout

    assert ZenFlowConfig().worker_timeout_seconds <= default_pg_timeout.total_seconds() / 2


def test_deepspeeds_own_checks_keep_their_error() -> None:
    with pytest.raises(ValueError, match="stage") as error:
        ZeroConfig(stage=17)
    assert not isinstance(error.value, ConfigError)


# -- what is not given -----------------------------------------------------------------------------


@pytest.mark.parametrize("ratio", ["auto", "fit"])
def test_a_ratio_that_is_chosen_leaves_the_other_fields_as_they_are(ratio: str) -> None:
    zero = ZeroConfig(
        stage=2, zenflow={}, offload_optimizer={"device": "cpu", "pin_memory": True, "ratio": ratio}
    )
    assert zero.offload_optimizer is not None
    assert (zero.offload_optimizer.device, zero.offload_optimizer.pin_memory) == ("cpu", True)
    assert zero.host_ratio == "auto"


def test_auto_means_not_given() -> None:
    for model, name in OF_THE_SECTION:
        if model is not ZeroFields:
            assert model(**{name: "auto"}) == model(), name
            assert model(**{name: "auto"}).model_fields_set == set(), name
        assert ZeroConfig(**{name: "auto"} if model is ZeroFields else {}) == ZeroConfig(), name
    assert ZeroConfig(zenflow={"select_interval": "auto"}).zenflow == ZeroConfig(zenflow={}).zenflow


def test_a_value_that_fits_no_branch_of_a_type_is_one_mistake_of_the_field() -> None:
    with pytest.raises(ConfigError) as caught:
        ZeroConfig(zenflow={"update_interval": "mesured"})
    assert "zenflow.update_interval = 'mesured': " in str(caught.value)
    assert str(caught.value).count("mesured") == 1


WRONG_FORMS = (True, 3, "yes", [1], "stage: 2")
SECTIONS = ("zenflow", "core_binding", "offload_optimizer", "offload_param")


@pytest.mark.usefixtures("_enabled")
@pytest.mark.parametrize("name", SECTIONS)
@pytest.mark.parametrize("value", [*WRONG_FORMS, {1: 2}, {None: 1}, {("a", 1): 1}])
def test_a_section_of_a_wrong_form_is_one_clear_error(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"^zero_optimization\.{name} ") as caught:
        deepspeed.DeepSpeedConfig(
            {"train_batch_size": 1, "zero_optimization": {"stage": 2, name: value}}
        )
    assert "\n" not in str(caught.value)
    assert (
        "keys are names of fields" if isinstance(value, dict) else "expected an object, such as"
    ) in str(caught.value)


@pytest.mark.usefixtures("_enabled")
@pytest.mark.parametrize("zero", [[], None, "stage: 2", 3, {1: 2}])
def test_a_zero_optimization_of_a_wrong_form_is_one_clear_error(zero: Any) -> None:
    with pytest.raises(ConfigError, match=r"^zero_optimization "):
        deepspeed.DeepSpeedConfig({"train_batch_size": 1, "zero_optimization": zero})


@pytest.mark.usefixtures("_enabled")
@pytest.mark.parametrize(
    ("text", "says"),
    [
        (None, "is a folder"),
        ("", "is empty"),
        (" # nothing\n", "is empty"),
        ("null", "holds a NoneType, expected an object"),
        ("[]", "holds a list, expected an object"),
        ("zero_optimization:\n  stage: 2\n", "DeepSpeed does not read YAML"),
        ("- a\n- b\n", "DeepSpeed does not read YAML"),
        ('{"zero_optimization": {', "is not a readable JSON file"),
        ('{"bf16": {}, "bf16": {}, "fp16": {}}', "duplicate keys: bf16"),
    ],
)
def test_a_file_that_is_no_config_is_one_clear_error(
    text: str | None, says: str, tmp_path: Path
) -> None:
    path = tmp_path / "ds.yaml"
    if text is None:
        path.mkdir()
    else:
        path.write_text(text)
    for read in (deepspeed.DeepSpeedConfig, read_json):
        with pytest.raises(ConfigError, match=says):
            read(str(path))


@pytest.mark.usefixtures("_enabled")
def test_right_files_and_forms_are_read_as_before(tmp_path: Path) -> None:
    """JSON is YAML, comments are allowed, DeepSpeed's sections may be left to a trainer."""
    path = tmp_path / "ds.yaml"
    path.write_text(
        '{"train_batch_size": 1, /* a comment */ "zero_optimization": '
        '{"stage": 2, "zenflow": "auto"}}'
    )
    assert int(deepspeed.DeepSpeedConfig(str(path)).zero_config.stage) == 2
    for zero in (
        True,
        {},
        {"zenflow": None},
        {"stage": 1, "offload_optimizer": None, "core_binding": "auto"},
    ):
        deepspeed.DeepSpeedConfig({"train_batch_size": 1, "zero_optimization": zero})


SELECTING: dict[str, Any] = {"topk_ratio": 0.2, "select_strategy": "step", "select_interval": 8}


def test_every_select_field_and_nothing_else_chooses_the_selective_rule() -> None:
    assert set(SELECTING) == {n for n in ZenFlowConfig.model_fields if n.startswith("select_")} | {
        "topk_ratio"
    }
    for name, value in SELECTING.items():
        assert ZenFlowConfig(**{name: value}).rule == "selective", name
        assert ZenFlowConfig(**{name: value}, update_rule="predictive").rule == "predictive", name
    assert ZenFlowConfig(update_interval=4, overlap_step=True, block_size=64).rule == "predictive"


def test_fields_of_one_rule_say_so_and_are_noticed_under_the_other() -> None:
    """A field belongs to one rule exactly if its text begins with that rule's name and does not
    mention the other."""
    for name, field in ZenFlowConfig.model_fields.items():
        text = field.description or ""
        for rule, other in (("predictive", "selective"), ("selective", "predictive")):
            alone = text.startswith(f"``{rule}``") and f"``{other}``: " not in text
            assert (name in OF_ONE_RULE[rule]) == alone, name  # type: ignore[index]
    given = {**SELECTING, "update_interval": 2}
    for rule in ("predictive", "exact"):
        config = ZenFlowConfig(update_interval=4, update_rule=rule)
        assert given_of_the_other_rule(config) == ["update_interval"]
    assert given_of_the_other_rule(ZenFlowConfig(**given)) == []
    assert given_of_the_other_rule(ZenFlowConfig(**given, update_rule="predictive")) == [
        "update_interval",
        *SELECTING,
    ]
    assert given_of_the_other_rule(ZenFlowConfig(topk_ratio=0.1, state_dtype="int8")) == [
        "state_dtype"
    ]
    every = ZenFlowConfig(**given, update_rule="exact", block_size=64, prediction_error_factor=2.0)
    idle = given_of_the_other_rule(every)
    wanted = [*SELECTING, "prediction_error_factor", "update_interval"]
    assert sorted(idle) == sorted(wanted)
    assert given_of_the_other_rule(ZenFlowConfig(update_rule="exact", update_interval=1)) == []


def test_weights_arrive_late_under_the_exact_rule_unless_steps_wait() -> None:
    exact = ZenFlowConfig(update_rule="exact")
    assert (exact.overlapped, exact.streams) == (False, True)
    assert not ZenFlowConfig(update_rule="exact", overlap_step=False).streams
    assert not ZenFlowConfig().streams
    assert not ZenFlowConfig(topk_ratio=0.1).streams


OLD_VALUES = {
    "update_rule": ("measured",),
    "update_interval": ("measured",),
    "hide_transfers": (True, False),
    "publish_dtype": ("float32", "float16"),
    "save_predicted_weights": (True, False),
    "weights_arrive_in_forward": (True, False),
    "select_block_size": (256,),
    "overlap_lag": (1, 2),
    "auto_ratio": (0.99,),
    "offload": (True, False),
}
"""Values of retired fields that earlier releases took."""


def test_a_retired_field_is_read_and_says_what_it_means_now() -> None:
    assert OLD_VALUES.keys() == RETIRED.keys()
    for name, values in OLD_VALUES.items():
        for value in values:
            found = ZenFlowConfig.model_validate({name: value, "block_size": 64})
            assert found.retired == {name: RETIRED[name]}
            assert found.model_dump() == ZenFlowConfig(block_size=64).model_dump()
            assert found.model_fields_set == {"block_size"}
            section = ZeroConfig(stage=2, zenflow={name: value}).zenflow  # has DeepSpeed's fields
            assert section is not None
            assert section.retired == found.retired
        for absent in ("auto", None):
            assert ZenFlowConfig.model_validate({name: absent}).retired == {}


# -- tools that only read configs ------------------------------------------------------------------


UPSTREAM_SECTION = {
    "topk_ratio": 0.25,
    "select_strategy": "auto",
    "select_interval": 4,
    "update_interval": 8,
    "full_warm_up_rounds": 1,
    "overlap_step": True,
}


@pytest.mark.usefixtures("_enabled")
def test_what_reads_deepspeeds_config_reads_ours() -> None:
    """What DeepSpeed's own test of its config class asks of it."""
    for section in ({}, UPSTREAM_SECTION):
        config = zero_config_module.DeepSpeedZeroConfig(zenflow=section)
        assert isinstance(config.zenflow, DeepSpeedZenFlowConfig)
        assert isinstance(config.zenflow, ZenFlowConfig)
    for name, value in UPSTREAM_SECTION.items():
        assert getattr(config.zenflow, name) == value, name
    with pytest.raises(ValidationError):
        zero_config_module.DeepSpeedZeroConfig(zenflow=123)


@pytest.mark.usefixtures("_enabled")
def test_what_only_deepspeeds_own_zenflow_refuses_is_accepted() -> None:
    zero = {"stage": 2, "zenflow": {}, "offload_optimizer": {"device": "cpu"}}
    config = Config(
        {"train_batch_size": 1, "gradient_allreduce_op": "sum", "zero_optimization": zero}
    )
    assert config.zero_config.zenflow is not None


@pytest.mark.usefixtures("_enabled")
@pytest.mark.parametrize(
    "zero",
    [
        {"zenflow": {}},
        {"stage": 3, "zenflow": {}, "offload_optimizer": {"device": "nvme", "nvme_path": "/tmp"}},
    ],
)
def test_what_is_not_built_can_be_read(zero: dict[str, Any]) -> None:
    config = DeepSpeedConfig({"train_batch_size": 1, "zero_optimization": zero})
    assert config.zero_config.zenflow is not None
    with pytest.raises(ConfigError, match="remove that setting or the zenflow section"):
        require_supported(config.zero_config)


@pytest.mark.parametrize(("ratio", "named"), [("auto", '"auto"'), ("fit", '"auto"'), (0.5, "0.5")])
def test_a_refused_share_is_named_with_its_value(ratio: Any, named: str) -> None:
    offload, refused = {"device": "cpu", "ratio": ratio}, {"gradients_on_host": True}
    with pytest.raises(ConfigError, match=f"with offload_optimizer.ratio = {named}"):
        require_supported(ZeroConfig(stage=2, zenflow=refused, offload_optimizer=offload))
    require_supported(
        ZeroConfig(stage=2, zenflow={"state_dtype": "int8"}, offload_optimizer=offload)
    )


@pytest.mark.parametrize("value", [1, 64, 0.01, 0.5, 0.99])
def test_a_count_or_a_fraction_of_cores_is_kept_as_it_is(value: float) -> None:
    reserved = TypeAdapter(ReservedCores)
    for kept in (reserved.validate_python(value), reserved.validate_json(str(value))):
        assert (kept, type(kept)) == (value, type(value))
    for wrong in (0, -1, 0.0, 1.0, 2.0, float("nan"), float("inf"), True, "4", "auto", None, [1]):
        with pytest.raises(ValidationError):
            reserved.validate_python(wrong)


@pytest.mark.parametrize(
    ("fields", "reserved"),
    [
        ({}, None),
        ({"pt_reserved_cores": 3}, 3),
        ({"pt_reserved_cores_perc": 0.25}, 0.25),
        ({"pt_reserved_cores_perc": 0.0}, None),
        ({"pt_reserved_cores_perc": 1.0}, None),
        ({"pt_reserved_cores": 3, "pt_reserved_cores_perc": 0.25}, 3),
    ],
)
def test_reserved_cores_are_a_number_or_a_fraction_between_none_and_all(
    fields: dict[str, Any], reserved: float | None
) -> None:
    assert ZenFlowConfig.model_validate(fields).pt_reserved_cores == reserved
