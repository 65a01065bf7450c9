"""DSEXT_AUTOLOAD=1: the extension is on at the end of DeepSpeed's import, whoever imports it and
when.

Most tests import packages of their own in place of DeepSpeed, through Python's real import system;
the last ones import torch and DeepSpeed in new processes.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import deepspeed_ext
from deepspeed_ext import autoload
from deepspeed_ext.errors import UnsupportedError
from deepspeed_ext.runtime.log import logger

PACKAGE = {
    "fakespeed/__init__.py": "from . import first\nfrom . import second\ndef initialize(): return "
    "'stock'\n",
    "fakespeed/first.py": "",
    "fakespeed/second.py": "",
    "fakespeed/late.py": "",
}


class Recorder:
    """Stands in for `deepspeed_ext.enable`: notes whether the package was complete, and may
    fail."""

    def __init__(self) -> None:
        self.calls: list[bool] = []
        self.error: Exception | None = None

    def enable(self) -> None:
        self.calls.append(hasattr(sys.modules["fakespeed"], "initialize"))
        if self.error is not None:
            raise self.error


@pytest.fixture
def recorder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Recorder]:
    for name, text in PACKAGE.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    found = Recorder()
    before = list(sys.meta_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(autoload, "DEEPSPEED", "fakespeed")
    monkeypatch.setattr(deepspeed_ext, "enable", found.enable)
    monkeypatch.setenv("DSEXT_AUTOLOAD", "1")
    yield found
    assert [finder for finder in sys.meta_path if finder not in before] == []
    for name in [name for name in sys.modules if name.partition(".")[0] == "fakespeed"]:
        del sys.modules[name]


@pytest.fixture
def errors(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    found: list[str] = []
    monkeypatch.setattr(logger, "error", found.append)
    return found


def test_it_is_on_at_the_end_of_the_import(recorder: Recorder) -> None:
    autoload.autoload()
    module = importlib.import_module("fakespeed")
    assert recorder.calls == [True]
    assert type(module.__spec__) is importlib.machinery.ModuleSpec
    importlib.import_module("fakespeed.late")
    assert recorder.calls == [True], "once, so that a later disable() holds"


def test_it_is_on_if_deepspeed_itself_imports_torch(recorder: Recorder, tmp_path: Path) -> None:
    """torch then calls in the middle of DeepSpeed's import."""
    text = (
        f"from deepspeed_ext.autoload import "
        f"autoload\nautoload()\n{PACKAGE['fakespeed/__init__.py']}"
    )
    (tmp_path / "fakespeed/__init__.py").write_text(text)
    importlib.import_module("fakespeed.first")
    assert recorder.calls == [True]


def test_it_is_on_if_deepspeed_was_imported_before(recorder: Recorder) -> None:
    importlib.import_module("fakespeed")
    autoload.autoload()
    assert recorder.calls == [True]


def test_an_import_that_fails_and_is_tried_again_counts_when_it_succeeds(
    recorder: Recorder, tmp_path: Path
) -> None:
    (tmp_path / "fakespeed/second.py").write_text("raise ImportError('no such library')\n")
    autoload.autoload()
    with pytest.raises(ImportError, match="no such library"):
        importlib.import_module("fakespeed")
    assert recorder.calls == []
    # of another size than the cached one
    (tmp_path / "fakespeed/second.py").write_text("x = 1\n" * 3)
    importlib.import_module("fakespeed")
    assert recorder.calls == [True]


def test_looking_for_deepspeed_is_not_importing_it(recorder: Recorder) -> None:
    autoload.autoload()
    assert importlib.util.find_spec("fakespeed") is not None
    assert recorder.calls == []
    importlib.import_module("fakespeed")
    assert recorder.calls == [True]


def test_it_waits_for_modules_of_ours_that_import_deepspeed(
    recorder: Recorder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `deepspeed_ext.enable` does: its own modules must be complete when it is called again."""
    (tmp_path / "ours").mkdir()
    (tmp_path / "ours/module.py").write_text("import fakespeed\ncomplete = True\n")
    monkeypatch.setattr(
        deepspeed_ext, "__path__", [*deepspeed_ext.__path__, str(tmp_path / "ours")]
    )
    complete = []

    def enable() -> None:
        complete.append(hasattr(sys.modules["deepspeed_ext.module"], "complete"))

    monkeypatch.setattr(deepspeed_ext, "enable", enable)
    autoload.autoload()
    try:
        importlib.import_module("deepspeed_ext.module")
    finally:
        sys.modules.pop("deepspeed_ext.module", None)
        vars(deepspeed_ext).pop("module", None)
    assert complete == [True]


def test_other_threads_see_deepspeed_only_when_it_is_on(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    enabling, seen = threading.Event(), []

    def elsewhere() -> None:
        assert enabling.wait(60)
        importlib.import_module("fakespeed")
        seen.append(list(recorder.calls))

    def enable() -> None:
        enabling.set()
        other.join(0.3)  # it would be through by now if it did not wait
        recorder.enable()

    monkeypatch.setattr(deepspeed_ext, "enable", enable)
    other = threading.Thread(target=elsewhere)
    other.start()
    autoload.autoload()
    importlib.import_module("fakespeed")
    other.join(60)
    assert seen == [[True]]


@pytest.mark.parametrize("setting", [None, "", "0"])
def test_without_the_variable_it_does_nothing(
    setting: str | None, recorder: Recorder, errors: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DSEXT_AUTOLOAD")
    if setting is not None:
        monkeypatch.setenv("DSEXT_AUTOLOAD", setting)
    before = list(sys.meta_path)
    autoload.autoload()
    assert sys.meta_path == before
    importlib.import_module("fakespeed")
    assert recorder.calls == []
    assert errors == []


def test_another_value_is_named_and_leaves_it_off(
    recorder: Recorder, errors: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DSEXT_AUTOLOAD", "yes")
    autoload.autoload()
    importlib.import_module("fakespeed")
    assert recorder.calls == []
    (message,) = errors
    assert "DSEXT_AUTOLOAD must be 0 or 1, got 'yes'" in message


def test_a_failure_breaks_no_import_and_no_run_trains_without_the_extension(
    recorder: Recorder, errors: list[str]
) -> None:
    recorder.error = RuntimeError("broken on purpose")
    autoload.autoload()
    module: Any = importlib.import_module("fakespeed")
    (message,) = errors
    assert "DSEXT_AUTOLOAD=1 failed: RuntimeError: broken on purpose" in message
    for _ in range(2):
        with pytest.raises(UnsupportedError, match=r"broken on purpose.*DSEXT_AUTOLOAD=0") as error:
            module.initialize(model=None)
        assert error.value.__cause__ is recorder.error


def test_a_failure_of_the_watch_itself_breaks_no_import(
    errors: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DSEXT_AUTOLOAD", "1")
    monkeypatch.setattr(autoload._Watch, "start", lambda self: 1 / 0)
    autoload.autoload()
    assert ["ZeroDivisionError" in message for message in errors] == [True]


# -- new processes ---------------------------------------------------------------------------------


def run(code: str, **variables: str) -> list[str]:
    """The lines that `code` prints in a new process."""
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", **variables}
    command = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(code)]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=False, timeout=280
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


OURS = 'print(*sorted(name for name in sys.modules if name.startswith("deepspeed")))'


@pytest.mark.parametrize("setting", [pytest.param("0", marks=pytest.mark.full), "1"])
def test_import_of_torch_loads_nothing_heavy_of_ours(setting: str) -> None:
    """Beside `errors`, which has no imports, and a module that reads the mask of CPUs."""
    ours = ["", ".autoload", ".cores", ".errors"]
    (line,) = run(f"import sys, torch\n{OURS}", DSEXT_AUTOLOAD=setting)
    assert line.split() == [f"deepspeed_ext{name}" for name in ours]


def test_torchs_own_switch_turns_it_off_and_our_modules_import_only_what_torch_has() -> None:
    code = f"""
    import sys, torch
    {OURS}
    print([each for each in sys.meta_path if "_Watch" in str(each)])
    before = set(sys.modules)
    sys.path.insert(0, {str(Path(deepspeed_ext.__file__).parent.parent)!r})
    import deepspeed_ext.autoload
    new = set(sys.modules) - before
    print(*sorted(name for name in new if name.partition(".")[0] != "deepspeed_ext"))
    """
    lines = run(code, DSEXT_AUTOLOAD="1", TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert lines == ["", "[]", ""]


RANKS = """
import deepspeed  # which imports torch
import multiprocessing, os, sys

def error():
    try:
        deepspeed.initialize()
    except Exception as error:
        return type(error).__name__, str(error)

def say(queue):
    queue.put((os.getpid() != PARENT, *error()))

PARENT = os.getppid() if __name__ != "__main__" else os.getpid()
if __name__ == "__main__":
    print("here", *error())
    for way in ("fork", "spawn"):
        context = multiprocessing.get_context(way)
        queue = context.Queue()
        rank = context.Process(target=say, args=(queue,))
        rank.start()
        print(way, *queue.get(timeout=200))
        rank.join()
"""
LATE = """
import multiprocessing, torch

def say(queue):
    import deepspeed
    queue.put(deepspeed.DeepSpeedEngine.__module__)

queue = multiprocessing.get_context("fork").Queue()
rank = multiprocessing.get_context("fork").Process(target=say, args=(queue,))
rank.start()
print(queue.get(timeout=200))
rank.join()
"""


def test_ranks_that_are_forked_or_spawned_have_it(tmp_path: Path) -> None:
    """With a package in DeepSpeed's place that the extension does not fit, which breaks no import
    and shows that it was to be on."""
    (tmp_path / "deepspeed/runtime").mkdir(parents=True)
    (tmp_path / "deepspeed/__init__.py").write_text(
        "import torch\nfrom . import runtime\n__version__ = '0.1'\n"
    )
    (tmp_path / "deepspeed/runtime/__init__.py").write_text("")
    script = tmp_path / "ranks.py"
    script.write_text(RANKS)
    start = f"import runpy; runpy.run_path({str(script)!r}, run_name='__main__')"
    lines = run(start, DSEXT_AUTOLOAD="1", PYTHONPATH=str(tmp_path))
    message = "UnsupportedError DSEXT_AUTOLOAD=1 failed: ModuleNotFoundError: No module named 'deep"
    for line, way in zip(lines, ("here", "fork True", "spawn True"), strict=True):
        assert line.startswith(f"{way} {message}")


@pytest.mark.full
def test_a_rank_forked_between_torch_and_deepspeed_has_it() -> None:
    assert run(LATE, DSEXT_AUTOLOAD="1") == ["deepspeed_ext.adapter.engine"]


@pytest.mark.parametrize(
    ("call", "module"),
    [
        ("enable", "deepspeed_ext.adapter.engine"),
        pytest.param("disable", "deepspeed.runtime.engine", marks=pytest.mark.full),
    ],
)
def test_our_own_functions_may_be_what_imports_deepspeed(call: str, module: str) -> None:
    code = f"""
    import deepspeed_ext
    deepspeed_ext.{call}()
    import deepspeed
    print(deepspeed.DeepSpeedEngine.__module__)
    """
    assert run(code, DSEXT_AUTOLOAD="1") == [module]
