"""Invented configs: each is read, or refused with an error that is meant for the user.

`make fuzz` tries `EXAMPLES` of each kind in place of a hundred.
"""
# ruff: noqa: PT017 -- whether there is an error is what is invented

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from deepspeed_ext.adapter.upstream import DeepSpeedZeroConfig, swapped, zero_section_class
from deepspeed_ext.adapter.zero_config import Config, ZeroConfig
from deepspeed_ext.config import CoreBindingConfig, ZenFlowConfig, ZeroFields
from deepspeed_ext.config.file import EXAMPLES, read_json
from deepspeed_ext.errors import ConfigError

OURS = list(ZeroFields.model_fields)
THEIRS = [name for name in DeepSpeedZeroConfig.model_fields if name not in OURS]
FIELDS = {
    "zenflow": list(ZenFlowConfig.model_fields),
    "core_binding": list(CoreBindingConfig.model_fields),
    "offload_optimizer": ["device", "ratio", "pin_memory", "super_offload", "nvme_path"],
    "offload_param": ["device", "buffer_size", "max_in_cpu"],
}
ALMOST = ["zenfow", "core_bindings", "update_intervall", "strict", "", "é", "stage ", "cpu_offload"]
NUMBERS = [-1, 0, 1, 3, 255, 1 << 31, 1 << 63, -(1 << 63), 10**400, 1e-320, 1e308, 0.5, -0.0]
TEXTS = ["auto", "none", "cpu", "predictive", "selective", "9" * 5000, "nan", "\0", "٣", "x" * 300]
FILES = ["ds.json", "ds.yaml", "DS.YML", "ds", "train.py", "ds.toml"]
CONTENTS = [
    *("", " \n", "# a comment", "null", "[]", '"x"', "3", "{", "}", "{}", "%PDF-1.4", "\ufeff{}"),
    *("import deepspeed\n", "zero_optimization:\n  stage: 2\n", "- a\n", "[tool]\nstage = 2\n"),
    *("!!python/object/apply:os.system [id]", '{"zero_optimization": 1, "zero_optimization": {}}'),
]

SCALARS = st.one_of(
    st.sampled_from(NUMBERS), st.sampled_from(TEXTS), st.text(), st.floats(), st.integers(),
    st.booleans(), st.none(),
)  # fmt: skip
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


def _section(name: str) -> st.SearchStrategy[Any]:
    names = st.sampled_from([*FIELDS[name], *FIELDS[name], *ALMOST])
    return st.dictionaries(names, VALUES, max_size=4)


SECTIONS = st.fixed_dictionaries(
    {},
    optional={name: _section(name) | VALUES for name in FIELDS},
).flatmap(
    lambda sections: st.dictionaries(st.sampled_from([*OURS, *THEIRS, *ALMOST]), VALUES, max_size=3)
    .map(lambda others: {"stage": 2, **others, **sections})
)  # fmt: skip
many = settings(
    max_examples=int(os.environ.get("EXAMPLES", "100")),
    deadline=None,
    suppress_health_check=list(HealthCheck),
)


def _refuse(event: str, _: tuple[Any, ...]) -> None:
    if _watches and event in ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn"):
        raise SystemExit(f"reading a config called {event}")


_watches = False


@pytest.fixture(scope="module", autouse=True)
def no_process_starts() -> Iterator[None]:
    """A config runs no code: ends the tests if reading one starts a process."""
    global _watches
    sys.addaudithook(_refuse)  # cannot be removed
    _watches = True
    yield
    _watches = False


def _raised_by_deepspeed(error: Exception) -> bool:
    return "/deepspeed/" in traceback.extract_tb(error.__traceback__)[-1].filename


@many
@given(SECTIONS)
def test_a_section_is_read_or_refused(section: dict[str, Any]) -> None:
    section = json.loads(json.dumps(section))
    try:
        accepted = ZeroConfig(**section)
    except ConfigError as error:
        assert str(error)
    except ValidationError as error:
        # DeepSpeed has always raised this one for a `zenflow` that is no section.
        places = [mistake["loc"] for mistake in error.errors() if mistake["loc"] != ("zenflow",)]
        assert not any(place[:1] and place[0] in OURS for place in places), error
    except Exception as error:
        assert _raised_by_deepspeed(error)
        assert any(name not in OURS for name in section)
    else:
        assert accepted.zenflow is None or accepted.zenflow.rule in ("predictive", "selective")


KEYS: st.SearchStrategy[Any] = st.sampled_from(
    [1, None, True, 0.5, ("a", 1), b"stage", frozenset()]
)
CONFIGS = st.dictionaries(
    st.sampled_from(["zero_optimization", "optimizer", "zenflow"]) | KEYS, VALUES | SECTIONS
)


def _read(config: Any) -> None:
    """As `deepspeed.initialize` does."""
    try:
        with swapped(zero_section_class(ZeroConfig)):
            Config(config)
    except ConfigError as error:
        assert str(error).strip()
    except ValidationError as error:
        places = [mistake["loc"] for mistake in error.errors()]
        assert not any(len(place) == 1 and place[0] in EXAMPLES for place in places), error
    except Exception as error:
        if not _raised_by_deepspeed(error):
            raise


@many
@given(CONFIGS)
def test_a_dict_is_read_or_refused(config: dict[Any, Any]) -> None:
    _read({"train_micro_batch_size_per_gpu": 1, **config})


@many
@given(
    st.sampled_from(FILES),
    st.sampled_from(CONTENTS) | st.text() | CONFIGS.map(lambda it: json.dumps(it, skipkeys=True)),
)
def test_a_file_is_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, name: str, text: str
) -> None:
    path = tmp_path_factory.mktemp("config") / name
    path.write_bytes(text.encode(errors="surrogatepass"))
    try:
        read_json(str(path))
    except ConfigError as error:
        assert str(error).strip()
    _read(str(path))


@pytest.mark.parametrize("depth", [50, 2000, 100_000])
def test_deep_nesting_is_read_or_refused(depth: int) -> None:
    deep: Any = 1
    for _ in range(depth):
        deep = {"zenflow": deep}
    _read({"train_micro_batch_size_per_gpu": 1, "zero_optimization": deep})
