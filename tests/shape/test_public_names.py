"""What users may write: names, commands, options, config fields and variables. A change of any is a
change here.

Give it a line in CHANGELOG.md, too.
"""

from __future__ import annotations

import argparse
import importlib
import re
from importlib.metadata import entry_points

import pytest

from deepspeed_ext import autoload, config, errors
from deepspeed_ext.commands import main
from deepspeed_ext.commands.main import parser as parser_of_commands
from tests.support.paths import ROOT

MODULES = {
    "deepspeed_ext": "__version__ disable enable errors initialize weight_parts weights",
    "deepspeed_ext.config": "CoreBindingConfig FlattenTier ReservedCores RuleName "
    "ZenFlowConfig ZeroFields given_of_the_other_rule",
    "deepspeed_ext.integrations.safetensors": "save",
    "deepspeed_ext.integrations.transformers": "MeasurementsCallback log_measurements",
}
ERRORS = {
    "CheckpointError": "DeepSpeedExtError RuntimeError",
    "ConfigError": "DeepSpeedExtError ValueError",
    "DeepSpeedExtError": "Exception",
    "OutOfMemoryError": "DeepSpeedExtError RuntimeError",
    "PlanMismatchError": "DeepSpeedExtError RuntimeError",
    "RankError": "DeepSpeedExtError RuntimeError",
    "StateError": "DeepSpeedExtError RuntimeError",
    "UnsupportedError": "DeepSpeedExtError RuntimeError",
    "UpstreamError": "UnsupportedError",
    "WorkerError": "DeepSpeedExtError RuntimeError",
}
FIELDS = {
    "ZeroFields": "core_binding flatten_reserve_fraction flatten_tier stage3_allgather_single_param"
    " stage3_single_param_min_numel zenflow",
    "CoreBindingConfig": "dry_run enabled optimizer_cores",
    "ZenFlowConfig": "async_save autotune block_size full_warm_up_rounds "
    "gradients_on_host offload_reserve_fraction "
    "overlap_step prediction_error_factor pt_reserved_cores "
    "select_interval select_strategy state_dtype "
    "topk_ratio update_interval update_rule "
    "worker_timeout_seconds",
}
COMMANDS = {
    "": "--help --version",
    "config": "--help name",
    "doctor": "--help --json",
    "plan": "--all --card --config --dtype --for --fused-loss --gpu-gb "
    "--gpus --gpus-per-host --help --host --host-gb --host-gbps --json --keep-activations "
    "--link-gbps --memory --model --on-cpu --params --seq-len --tflops --tokens --write",
    "run": "--help arguments script",
    "verify": "--config --help --json --ranks --steps --timeout",
}
VARIABLES = "DSEXT_ALLOWED_CPUS DSEXT_AUTOLOAD DSEXT_BIND DSEXT_LOG_LEVEL DSEXT_NATIVE_KERNEL"


@pytest.mark.parametrize("name", MODULES)
def test_names_of_modules(name: str) -> None:
    module = importlib.import_module(name)
    assert " ".join(sorted(module.__all__)) == MODULES[name]
    assert all(hasattr(module, each) for each in module.__all__)


def test_the_page_names_all_of_it() -> None:
    page = (ROOT / "docs" / "api.md").read_text()
    package = MODULES["deepspeed_ext"].replace("__version__ ", "").replace(" errors", "")
    assert [name for name in (*package.split(), *ERRORS) if name not in page] == []


def test_names_of_errors() -> None:
    assert {
        name: " ".join(base.__name__ for base in kind.__bases__)
        for name, kind in vars(errors).items()
        if isinstance(kind, type)
    } == ERRORS


@pytest.mark.parametrize("name", FIELDS)
def test_names_of_config_fields(name: str) -> None:
    assert " ".join(sorted(getattr(config, name).model_fields)) == FIELDS[name]


def test_names_of_commands_and_options() -> None:
    parser = parser_of_commands()
    (commands,) = (each for each in parser._actions if isinstance(each, argparse._SubParsersAction))
    parsers = {"": parser, **commands.choices}
    found = {
        command: {
            action.option_strings[-1] if action.option_strings else action.dest
            for action in each._actions
        }
        for command, each in parsers.items()
    }
    found[""].remove(commands.dest)
    assert {command: " ".join(sorted(options)) for command, options in found.items()} == COMMANDS


def test_the_console_script() -> None:
    (script,) = entry_points(group="console_scripts", name="deepspeed-ext")
    assert script.load() is main.main


def test_the_entry_point_that_torch_calls() -> None:
    (entry,) = entry_points(group="torch.backends", name="deepspeed_ext")
    assert entry.load() is autoload.autoload


def test_names_of_variables() -> None:
    sources = "".join(path.read_text() for path in (ROOT / "deepspeed_ext").rglob("*.py"))
    assert " ".join(sorted(set(re.findall(r"DSEXT_[A-Z_]+", sources)))) == VARIABLES
