"""``deepspeed-ext verify`` in odd surroundings: files, folders, disks, signals, and another check
beside it."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import pytest
from deepspeed.runtime.config import DeepSpeedConfig

from deepspeed_ext.commands import main as cli
from deepspeed_ext.commands.verify import command, processes
from deepspeed_ext.commands.verify.checks import check_end
from deepspeed_ext.commands.verify.config import plan_check
from deepspeed_ext.commands.verify.figures import Death, Failure, Found, write
from deepspeed_ext.commands.verify.rank import result_file
from deepspeed_ext.config.file import read_json
from deepspeed_ext.errors import ConfigError
from deepspeed_ext.runtime.child_process import python_command
from tests.support.paths import ROOT
from tests.support.verify_faults import Fault
from tests.support.verify_runs import ForkedRanks, left_behind, nursery, shared_segments
from tests.support.waiting import wait_until
from tests.support.zenflow import zenflow_config

pytestmark = pytest.mark.cpu(
    reason="the ranks of a check are started by the package, with the CPU's accelerator"
)

RIGHT = zenflow_config(2, lr=3e-3)


def nested(depth: int) -> str:
    return '{"a":' * depth + "1" + "}" * depth


def of_text(text: str | bytes) -> Callable[[Path], None]:
    def make(path: Path) -> None:
        path.write_bytes(text.encode() if isinstance(text, str) else text)

    return make


def of_size(size: int) -> Callable[[Path], None]:
    def make(path: Path) -> None:
        path.touch()
        os.truncate(path, size)

    return make


CONFIGS: dict[str, Callable[[Path], None]] = {
    "no file": lambda path: None,
    "a folder": Path.mkdir,
    "a FIFO": os.mkfifo,
    "a loop": lambda path: path.symlink_to(path.name),
    "empty": of_text(""),
    "a list": of_text("[]"),
    "latin-1": of_text('{"optimizer": "é"}'.encode("latin-1")),
    "UTF-16": of_text('{"train_batch_size": 8}'.encode("utf-16")),
    "a mark in front": of_text(b"\xef\xbb\xbf{}"),
    "zeros": of_size(1000),
    "a section twice": of_text('{"train_batch_size": 8, "optimizer": {}, "optimizer": {}}'),
    "a number without end": of_text('{"train_batch_size": 8, "gradient_clipping": 1e400}'),
    "100 MB": of_size(100 << 20),
    "nested 70 deep": of_text(nested(70)),
    "nested 600 deep": of_text(nested(600)),
    "nested 100,000 deep": of_text(nested(100_000)),
    "no optimizer's name": of_text('{"train_batch_size": 8, "optimizer": {"params": {"lr": 1}}}'),
    "no learning rate": of_text(
        '{"train_batch_size": 8, "optimizer": {"type": "Adam", "params": {"lr": NaN}}}'
    ),
    "an unknown dtype": of_text(
        '{"train_batch_size": 8, "torch_autocast": {"enabled": true, "dtype": "int3"}}'
    ),
}


COMMENTED = """{
  // of the run
  "train_batch_size": 8, # two ranks
  "optimizer": {"type": "Adam", "params": {"lr": 1e-3,},},
}
"""


def test_a_config_is_read_as_deepspeed_reads_it(tmp_path: Path) -> None:
    """It takes comments and trailing commas, and refuses a section that comes twice."""
    path = tmp_path / "ds.json"
    path.write_text(COMMENTED)
    config = read_json(str(path))
    assert config == {"train_batch_size": 8, "optimizer": {"type": "Adam", "params": {"lr": 1e-3}}}
    assert DeepSpeedConfig(str(path))._param_dict == config
    CONFIGS["a section twice"](path)
    with pytest.raises(ConfigError, match="duplicate keys: optimizer"):
        read_json(str(path))
    with pytest.raises(ValueError, match="optimizer"):
        DeepSpeedConfig(str(path))


def one_line(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """What a command says that ends with status 2."""
    try:
        status = cli.main(["verify", *arguments])
    except SystemExit as leaving:
        status = int(leaving.code or 0)
    said = capsys.readouterr()
    assert (status, said.out, said.err.count("\n")) == (2, "", 1), said
    assert len(said.err) < 1000
    return said.err


@pytest.mark.parametrize("case", CONFIGS)
def test_what_is_no_config_is_one_line(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "ds.json"
    CONFIGS[case](path)
    one_line(["--config", str(path)], capsys)


@pytest.mark.parametrize(
    "arguments",
    [
        "",
        "--steps 0",
        "--steps 3",
        "--steps -1",
        "--steps 1001",
        "--ranks 0",
        "--timeout 0",
        "--timeout 1e3",
    ],
)
def test_what_is_no_number_of_anything_is_one_line(
    arguments: str, capsys: pytest.CaptureFixture[str]
) -> None:
    one_line([*(["--config", "ds.json"] if arguments else []), *arguments.split()], capsys)


def check(fault: Fault) -> dict[str, str]:
    """The verdicts of a short check on two ranks."""
    outcome = command.verify(
        RIGHT, 2, steps=4, limit_seconds=100.0, start=fault.as_json(), kind=ForkedRanks
    )
    return {
        each.name: each.status if each.status == "PASS" else each.detail for each in outcome.checks
    }


@pytest.mark.full
def test_a_folder_of_any_name_and_two_checks_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks once met at a URL, which ended at the # of a folder's name."""
    folder, before = tmp_path / "a #b?c=%41 é", shared_segments()
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    nursery()
    with ThreadPoolExecutor(2) as both:
        right, wrong = both.map(check, [Fault(), Fault(("not loaded",))])
    assert set(right.values()) == {"PASS"}
    assert [name for name, verdict in wrong.items() if verdict != "PASS"] == ["resume"]
    assert left_behind() == list(folder.iterdir()) == []
    assert shared_segments() <= before


def test_a_full_disk_is_no_fault_of_the_config(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Full before the check begins, or after something has failed."""
    room = iter([10 << 20])
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=next(room)))
    with pytest.raises(OSError, match="temporary files, and 10 are free"):
        check(Fault())
    room = iter([100 << 20, 1000])
    with pytest.raises(OSError, match="0 are free"):
        check(Fault(("raises",), step=0))
    assert left_behind() == list(tmp_path.iterdir()) == []


def test_modules_of_the_working_folder_are_not_imported(tmp_path: Path) -> None:
    """A user's folder may hold a random.py or a data.json.py; only a missing plan may stop this
    rank."""
    for name in ("random", "json", "queue", "torch", "signal", "deepspeed"):
        (tmp_path / f"{name}.py").write_text(f"raise SystemExit('{name}.py of the folder')")
    environment = {**os.environ, processes.PARENT: str(os.getpid()), "RANK": "0"}
    code = python_command(processes.START_RANK, str(tmp_path), "train")
    done = subprocess.run(
        code, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert "plan.json" in done.stderr.splitlines()[-1], done.stderr


def test_ranks_search_where_this_process_does(tmp_path: Path) -> None:
    """The package's folder, which may be site-packages, once came before the standard library."""
    environment = Brief(tmp_path, "train", 0)._environment(0, 1)
    assert environment.get("PYTHONPATH") == os.environ.get("PYTHONPATH")


def test_a_rank_that_starts_after_its_check_has_ended_ends(tmp_path: Path) -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    environment = {**os.environ, processes.PARENT: str(ended.pid), "RANK": "0"}
    code = python_command(processes.START_RANK, str(tmp_path), "train")
    done = subprocess.run(code, env=environment, capture_output=True, text=True, check=False)
    assert "the check has ended" in done.stderr


def test_ranks_that_have_started_end_if_another_cannot_start(tmp_path: Path) -> None:
    started: list[subprocess.Popen[bytes]] = []

    class Second(processes.Ranks):
        def _process(self, start: str, environment: dict[str, str], log: object) -> object:
            if started:
                raise BlockingIOError("no more processes")
            started.append(subprocess.Popen(["sleep", "600"], env=environment))
            return started[0]

    with pytest.raises(BlockingIOError):
        Second(tmp_path, "train", 2)
    assert started[0].poll() == -signal.SIGKILL


def test_a_rank_that_does_not_end_does_not_stop_the_check(tmp_path: Path) -> None:
    class Stuck(processes.Ranks):
        def _process(self, start: str, environment: dict[str, str], log: object) -> Any:
            return self

        pid = 1 << 30

        def poll(self) -> None:
            pass

        def wait(self, *limit: Any) -> Any:  # type: ignore[override]
            assert limit, "this wait would never end"
            raise subprocess.TimeoutExpired("rank", limit[0])

    with Stuck(tmp_path, "train", 1) as ranks:
        pass
    assert ranks._alive() == []


class Brief(processes.Ranks):
    """Ranks that end at once, without a result; the last one stays."""

    def _process(
        self, start: str, environment: dict[str, str], log: object
    ) -> subprocess.Popen[bytes]:
        stays = environment["RANK"] == "1" and start == "stays"
        return subprocess.Popen(["sleep", "600"] if stays else ["true"], env=environment)

    def _alive(self) -> list[int]:
        return []


class Badly(Brief):
    """Ranks of which the last ends with a status."""

    def _process(
        self, start: str, environment: dict[str, str], log: object
    ) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            ["sh", "-c", f"exit $((7 * {environment['RANK']}))"], env=environment
        )


def test_a_rank_that_ends_with_a_status_after_its_last_stage_has_not_passed(tmp_path: Path) -> None:
    plan = plan_check(RIGHT, 2, 4, False, str(tmp_path))
    error = Failure("worker", ("WorkerError",), "the optimizer process was killed")
    for found, fails in (
        (Found("end"), True),
        (Found("worker", death=Death(0.1, 1, error)), False),
    ):
        for rank in range(2):
            write(found, result_file(tmp_path, "train", rank))
        merged, ended = command._phase(Badly(tmp_path, "train", 2), plan, 10.0, lambda: None)
        end = check_end(merged, ended.why)
        assert ("rank 1 ended with status 7" in end.detail) == (end.status == "FAIL") == fails


class SignalAt:
    """A trace function that sends this process a signal at the first visit of the n-th line of a
    check."""

    FILES = (
        "commands/verify/command.py",
        "commands/verify/processes.py",
        "/tempfile.py",
        "/shutil.py",
        "/contextlib.py",
    )

    def __init__(self, n: int) -> None:
        self.n, self.seen = n, set[tuple[str, int]]()

    def __call__(self, frame: FrameType, event: str, argument: object) -> SignalAt | None:
        path, line = frame.f_code.co_filename, (frame.f_code.co_filename, frame.f_lineno)
        if not path.endswith(self.FILES):
            return None
        if (
            event == "line"
            and line not in self.seen
            and "_signals_noted" in repr(signal.getsignal(signal.SIGTERM))
        ):
            self.seen.add(line)
            if len(self.seen) == self.n:
                os.kill(os.getpid(), signal.SIGTERM)
        return self


EVERY_THIRD: list[Any] = [("ends", 1, 3), ("stays", 2, 3)]
EVERY = [pytest.param(start, 1, 1, marks=pytest.mark.full) for start in ("ends", "stays")]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("start", "first", "every"), EVERY_THIRD + EVERY)
def test_a_signal_at_any_line_cuts_no_clean_up_short(
    start: str, first: int, every: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A signal that came while ranks were ended or the folder was removed once left both."""
    (tmp_path / "ds.json").write_text(json.dumps(RIGHT))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    ours = partial(command.verify, start=start, kind=Brief)
    monkeypatch.setattr(
        command, "verify", lambda *args, **how: ours(*args, **{**how, "limit_seconds": 0.01})
    )
    arguments = ["verify", "--config", str(tmp_path / "ds.json"), "--ranks", "2"]
    tracing = sys.gettrace()
    for n in itertools.count(first, every):
        signals = SignalAt(n)
        sys.settrace(signals)
        try:
            cli.main(arguments)
        except SystemExit as leaving:
            status = leaving.code
        else:
            status = None
        finally:
            sys.settrace(tracing)
        assert left_behind() == list((tmp_path / "tmp").iterdir()) == [], n
        if len(signals.seen) < n:
            break
        assert status == 128 + signal.SIGTERM, (n, signals.seen)
    assert n > 80


@pytest.mark.full
@pytest.mark.parametrize("seconds", [0.0, 4.0, 12.0])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_a_signal_ends_everything(number: signal.Signals, seconds: float, tmp_path: Path) -> None:
    """At any time, without a traceback; only SIGKILL leaves the folder, and no process outlives
    it."""
    path, temporary, before = tmp_path / "ds.json", tmp_path / "tmp", shared_segments()
    temporary.mkdir()
    path.write_text(json.dumps(RIGHT))
    arguments = [
        sys.executable,
        "-m",
        "deepspeed_ext.commands.main",
        "verify",
        "--config",
        "ds.json",
    ]
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "DS_ACCELERATOR": "cpu",
        "TMPDIR": str(temporary),
    }
    with subprocess.Popen(
        arguments, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True
    ) as run:
        wait_until(lambda: bool(list(temporary.glob("*/plan.json"))), "the check's start")
        time.sleep(seconds)  # at any moment of the check
        run.send_signal(number)
        _, said = run.communicate(timeout=60)
    assert run.returncode == (-number if number == signal.SIGKILL else 128 + number)
    assert "Traceback" not in said
    wait_until(lambda: left_behind(run.pid) == [], "the end of all ranks")
    # torch's, for all runs
    left = [path for path in temporary.iterdir() if not path.name.startswith("torchinductor_")]
    assert number == signal.SIGKILL or left == []
    assert shared_segments() <= before
