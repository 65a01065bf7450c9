"""However the trainer ends, its worker ends with it."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch.utils.data import DataLoader

from tests.support.models import batches
from tests.support.optimizer_process import gone
from tests.support.ranks import is_simulated, nursery, run_ranks
from tests.support.same import first_difference
from tests.support.waiting import wait_until
from tests.support.zenflow import make_engine, train, weights_of, zenflow_config

pytestmark = [pytest.mark.sampled(4), pytest.mark.usefixtures("started_workers")]

SCRIPT = "tests.unit.faults.lone_trainer"
ANNOUNCED = re.compile(r'\{"worker".*\n')


class Script:
    """`lone_trainer` in a process group of its own, as a terminal starts it."""

    def __init__(self, end: str, folder: Path) -> None:
        self.folder = folder
        device = "sim" if is_simulated("cpu") else "cpu"
        environment = {**os.environ, "DS_ACCELERATOR": "cpu", "DSEXT_TEST_DEVICE": device}
        if device == "sim":
            del environment["DS_ACCELERATOR"]
        self._output, self._errors = folder / "output.txt", folder / "errors.txt"
        with self._output.open("wb") as out, self._errors.open("wb") as errors:
            self.process = nursery(device).start_script(
                SCRIPT, [end, str(folder)], environment, out, errors
            )

    @property
    def worker(self) -> int:
        """Process id of the worker, once there is one."""
        wait_until(lambda: bool(self._announced()), f"a worker's start ({self._errors})")
        return json.loads(self._announced()[0])["worker"]

    def _announced(self) -> list[str]:
        return [
            line
            for line in self._output.read_text().splitlines(keepends=True)
            if ANNOUNCED.fullmatch(line)
        ]

    def end(self) -> tuple[int, str]:
        """Exit status and what was said on stderr.

        The process that forks scripts has imported Triton, if there is one, whose bindings count
        their objects at exit.
        """
        status = self.process.wait(timeout=60)
        return status, self._errors.read_text().partition("nanobind: leaked")[0]

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[str], Script]]:
    """Starts a script that ends in the given way."""
    with ExitStack() as started:
        yield lambda end: started.enter_context(closing(Script(end, tmp_path)))


@pytest.mark.parametrize("moment", ["idle", "stepping", "starting", "in a thread"])
def test_a_killed_trainer_leaves_no_worker(start: Callable[[str], Script], moment: str) -> None:
    script = start(moment)
    worker = script.worker
    script.process.kill()
    script.process.wait()
    assert gone(worker)


def test_an_exception_between_backward_and_step_ends_the_worker(
    start: Callable[[str], Script],
) -> None:
    script = start("exception")
    worker = script.worker
    status, said = script.end()
    assert status == 1
    assert said.rstrip().endswith("RuntimeError: a mistake of the user's")
    assert gone(worker)


def test_ctrl_c_ends_trainer_and_worker(start: Callable[[str], Script]) -> None:
    """SIGINT goes to the whole process group; the worker prints nothing and ends with the
    trainer."""
    script = start("interrupt")
    worker = script.worker
    os.killpg(script.process.pid, signal.SIGINT)
    status, said = script.end()
    assert status in (-signal.SIGINT, 128 + signal.SIGINT)
    assert said.count("Traceback") == said.count("KeyboardInterrupt") == 1
    assert "zenflow/worker/main.py" not in said
    assert gone(worker)


def test_a_preempted_script_saves_and_ends(start: Callable[[str], Script]) -> None:
    """A handler of SIGTERM lets the script save between two steps; then the signal ends it as
    usual. DeepSpeed's launcher and service managers signal the children, too, and first."""
    script = start("preempted")
    worker = script.worker
    for number in (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM):
        os.kill(worker, number)
    script.process.send_signal(signal.SIGTERM)
    status, said = script.end()
    assert status == -signal.SIGTERM, said
    assert (script.folder / "latest").read_text() == "last"
    assert len(list((script.folder / "last").glob("*optim_states.pt"))) == 1
    assert gone(worker)


@pytest.mark.parametrize(
    "end",
    [
        "saving",
        "saving without a process group",
        "saving before a mistake",
        "saving in a forked process",
    ],
)
def test_a_save_beside_training_is_complete_when_the_script_has_ended(
    start: Callable[[str], Script], end: str
) -> None:
    script = start(end)
    worker = script.worker
    status, said = script.end()
    assert status == (1 if "mistake" in end else 0), said
    assert (script.folder / "latest").read_text() == "last"
    (path,) = (script.folder / "last").glob("*optim_states.pt")
    state = torch.load(path, weights_only=False)["optimizer_state_dict"]["base_optimizer_state"][
        "state"
    ]
    assert all(moments["exp_avg_sq"].count_nonzero() > 0 for moments in state.values())
    assert [path.name for path in script.folder.iterdir() if ".dsext-" in path.name] == []
    assert gone(worker)


def test_an_interrupted_destroy_leaves_its_save_to_the_end_of_the_script(
    start: Callable[[str], Script],
) -> None:
    """Ctrl-C while `destroy` waits for a slow disk; the end says that it waits, and completes the
    save."""
    script = start("saving, interrupted")
    status, said = script.end()
    assert status in (-signal.SIGINT, 128 + signal.SIGINT), said
    assert (script.folder / "latest").read_text() == "last"
    assert len([line for line in said.splitlines() if "exit waits for a checkpoint" in line]) == 1
    assert said.count("Traceback") == 1, said
    assert [path.name for path in script.folder.iterdir() if ".dsext-" in path.name] == []


def test_a_save_that_the_end_gives_up_is_said_in_one_line(start: Callable[[str], Script]) -> None:
    """Ctrl-C while `destroy` waits, and again while the end does."""
    script = start("saving, interrupted twice")
    status, said = script.end()
    assert status in (-signal.SIGINT, 128 + signal.SIGINT), said
    (line,) = (line for line in said.splitlines() if "was not saved" in line)
    assert line.endswith("rank 0: checkpoint 'last' was not saved: KeyboardInterrupt")
    assert said.count("Traceback") == 1, said
    assert [path.name for path in script.folder.iterdir() if path.name.startswith("la")] == []


@pytest.mark.parametrize("end", ["exit", "destroy"])
def test_the_worker_ends_with_the_script(start: Callable[[str], Script], end: str) -> None:
    script = start(end)
    worker = script.worker
    assert script.end()[0] == 0
    assert gone(worker)


def train_with_forked_loader(config: dict) -> dict[str, Any]:
    """Two processes that are forked from the trainer load its data and outlive the worker."""
    data = batches(12, 0)
    engine = make_engine(config)
    expected = train(engine, data)
    weights = weights_of(engine)
    engine.destroy()

    engine = make_engine(config)
    worker = engine.optimizer.host_optimizer.link.process.pid
    ended: DataLoader[torch.Tensor] = DataLoader(
        torch.stack(data[:4]), batch_size=None, num_workers=2, multiprocessing_context="fork"
    )
    losses = train(engine, ended)
    alive = psutil.pid_exists(worker)
    kept: DataLoader[torch.Tensor] = DataLoader(
        torch.stack(data[4:]),
        batch_size=None,
        num_workers=2,
        multiprocessing_context="fork",
        persistent_workers=True,
    )
    losses += train(engine, kept)
    difference = first_difference(
        (expected, weights), (losses, weights_of(engine)), "losses, weights"
    )
    forked = [child.pid for child in psutil.Process().children() if child.pid != worker]
    engine.destroy()
    return {
        "difference": difference,
        "alive": alive,
        "forked": len(forked),
        "gone": gone(worker),
        "still forked": sum(map(psutil.pid_exists, forked)),
    }


def test_a_forked_data_loader_changes_nothing() -> None:
    found = run_ranks(1, train_with_forked_loader, zenflow_config(2))[0]
    assert found == {"difference": "", "alive": True, "forked": 2, "gone": True, "still forked": 2}
