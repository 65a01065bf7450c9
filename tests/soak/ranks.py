"""The processes of one launch of `tests.soak.trainer`, and what they have written so far."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

__all__ = ["Ranks", "SoakError", "read_lines"]

ROOT = Path(__file__).resolve().parents[2]
FINISH_SECONDS = 900.0
ORPHAN_SECONDS = 2.0
LEAD_SECONDS = 0.5
"""Before the ranks are suspended, so that they wait for their workers then."""


class SoakError(AssertionError):
    """The run did not do what it must."""


class Ranks:
    """Ranks that train in `folder`. Everything that they start carries a mark in its environment.

    Args:
        folder: of the run; a launch continues what is there.
        count: of ranks.
        flags: for the trainer.
        start_seconds: for anything that needs a start first, or a few dozens of steps.
    """

    def __init__(self, folder: Path, count: int, flags: list[str], start_seconds: float) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.mark, self.launched = folder, uuid.uuid4().hex, time.monotonic()
        self.start_seconds = start_seconds
        self.all = range(count)
        self._steps_before = [len(self.curve(rank)) for rank in self.all]
        self._events_before = [
            len(read_lines(folder / f"events-{rank}.jsonl")) for rank in self.all
        ]
        self.processes = [self._launch(rank, flags) for rank in self.all]

    def _launch(self, rank: int, flags: list[str]) -> subprocess.Popen[bytes]:
        environment = {
            **os.environ,
            **dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank)),
            **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE", "LOCAL_SIZE"), str(len(self.all))),
            "DS_ACCELERATOR": "cpu",
            "OMP_NUM_THREADS": "1",
            "SOAK_RENDEZVOUS": str(self.folder / f"rendezvous-{self.mark}"),
            "SOAK_MARK": self.mark,
        }
        command = [sys.executable, "-m", "tests.soak.trainer", "--folder", str(self.folder), *flags]
        with self._log(rank).open("wb") as log:
            return subprocess.Popen(
                command,
                cwd=ROOT,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def _log(self, rank: int) -> Path:
        return self.folder / f"log-{self.mark}-{rank}.txt"

    def said(self, rank: int) -> str:
        """What the rank has printed."""
        return self._log(rank).read_text(errors="replace")

    def curve(self, rank: int) -> list[list[Any]]:
        """[step, loss bits] of every step, earlier launches' included."""
        return read_lines(self.folder / f"curve-{rank}.jsonl")

    def events(self, rank: int, kind: str) -> list[dict[str, Any]]:
        """This launch's events of a kind."""
        events = read_lines(self.folder / f"events-{rank}.jsonl")[self._events_before[rank] :]
        return [event for event in events if event["event"] == kind]

    def steps(self) -> int:
        """Steps that every rank has made in this launch."""
        return min(len(self.curve(rank)) - self._steps_before[rank] for rank in self.all)

    def ask(self, rank: int, what: str, value: float) -> None:
        """Ask the trainer for a fault."""
        path = self.folder / f"{what}-{rank}"
        aside = path.with_suffix(".new")
        aside.write_text(repr(value))
        aside.replace(path)

    def checkpoints(self) -> list[int]:
        """Steps of the numbered checkpoints that are complete, oldest first."""
        if not (self.folder / "latest").exists():
            return []
        latest = int((self.folder / "latest").read_text() or -1)
        return sorted(
            int(p.name) for p in self.folder.iterdir() if p.name.isdigit() and int(p.name) <= latest
        )

    def last_step(self) -> int:
        """The last step that any launch has made."""
        return max((step for step, _ in self.curve(0)), default=0)

    def wait_until(self, happened: Callable[[], Any], seconds: float, what: str) -> float:
        """Poll; returns the seconds it took.

        Raises:
            SoakError: the time is up, or a rank has ended and it has not happened.
        """
        begin = time.monotonic()
        while not happened():
            ended = all(process.poll() is not None for process in self.processes)
            if time.monotonic() - begin > seconds or (ended and not happened()):
                tails = "; ".join(
                    f"rank {rank} said: {self.said(rank)[-1500:]}" for rank in self.all
                )
                why = "the ranks ended before" if ended else f"not within {seconds:g} s"
                raise SoakError(f"{what}: {why}; {tails}")
            time.sleep(0.02)
        return time.monotonic() - begin

    def wait_for_first_step(self) -> float:
        """Until every rank has made a step; returns the seconds since the launch."""
        self.wait_until(self.steps, self.start_seconds, "the first step after a launch")
        return time.monotonic() - self.launched

    def wait_for_error(self, seconds: float) -> float:
        """Until every rank has printed an exception, or has ended; returns the seconds it took."""
        return self.wait_until(
            lambda: all(map(self.failed, self.all)), seconds, "an error on every rank"
        )

    def failed(self, rank: int) -> bool:
        """Whether the rank has printed an exception, or has ended."""
        return self.processes[rank].poll() is not None or "Traceback (most" in self.said(rank)

    def wait_for_end(self, seconds: float) -> float:
        """Until every rank has ended; returns the seconds it took."""
        every = self.processes
        return self.wait_until(
            lambda: all(p.poll() is not None for p in every), seconds, "the end of every rank"
        )

    def finish(self, last_step: int) -> None:
        """Let the run end after `last_step`."""
        (self.folder / "last-step").write_text(str(last_step))
        self.wait_for_end(FINISH_SECONDS)
        if any(process.returncode for process in self.processes):
            tails = "; ".join(f"rank {rank} said: {self.said(rank)[-1500:]}" for rank in self.all)
            raise SoakError(f"ranks failed before the end: {tails}")

    def worker(self, rank: int) -> int:
        """Process id of the rank's worker, once there is one."""

        def found() -> list[int]:
            try:
                children = psutil.Process(self.processes[rank].pid).children()
                return [
                    child.pid
                    for child in children
                    if "zenflow.worker.main" in " ".join(child.cmdline())
                ]
            except psutil.Error:
                return []

        self.wait_until(found, self.start_seconds, "the start of a worker")
        return found()[0]

    def stop(self) -> None:
        """Suspend every process, workers a moment before their ranks."""
        ranks = [process.pid for process in self.processes]
        send(signal.SIGSTOP, set(self._alive()) - set(ranks))
        time.sleep(LEAD_SECONDS)
        send(signal.SIGSTOP, ranks)
        while any(
            psutil.Process(pid).status() not in (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE)
            for pid in ranks
        ):
            time.sleep(0.01)
        send(signal.SIGSTOP, self._alive())  # workers that have only just been started

    def go_on(self) -> None:
        """Let every process go on, ranks first."""
        ranks = [process.pid for process in self.processes]
        send(signal.SIGCONT, ranks)
        send(signal.SIGCONT, set(self._alive()) - set(ranks))

    def require_nothing_left(self) -> None:
        """Every process that this launch has started, workers included, is gone within seconds."""
        deadline = time.monotonic() + ORPHAN_SECONDS
        while left := self._alive():
            if time.monotonic() > deadline:
                raise SoakError(f"processes {left} are still there")
            time.sleep(0.02)

    def kill(self) -> None:
        """End whatever is left."""
        send(signal.SIGKILL, self._alive())
        for process in self.processes:
            process.wait()

    def _alive(self) -> list[int]:
        return [process.pid for process in psutil.process_iter() if self._is_ours(process)]

    def _is_ours(self, process: psutil.Process) -> bool:
        try:
            alive = process.status() != psutil.STATUS_ZOMBIE
            return alive and process.environ().get("SOAK_MARK") == self.mark
        except psutil.Error:
            return False


def send(number: signal.Signals, pids: Iterable[int]) -> None:
    """Signal every process that is still there."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def read_lines(path: Path) -> list[Any]:
    """The values of a file of JSON lines, none if there is no file."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
