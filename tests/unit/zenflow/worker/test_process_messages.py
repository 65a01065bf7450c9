"""Messages between trainer and optimizer process: work, answers, errors and timeouts."""

import os
import select
import signal
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from deepspeed_ext.errors import WorkerError
from deepspeed_ext.zenflow.worker import messages
from deepspeed_ext.zenflow.worker.arena import Arena
from deepspeed_ext.zenflow.worker.kernel.native import library_path
from deepspeed_ext.zenflow.worker.messages import (
    ArenaWrite,
    Channel,
    FilePart,
    Patience,
    ThreadLimit,
    WorkerTask,
)
from deepspeed_ext.zenflow.worker.process import OptimizerProcess
from tests.support.optimizer_process import NUMEL, PASS, STEP, gone, running


@pytest.mark.parametrize("library", [library_path(), None])
def test_steps_are_carried_out_in_shared_memory(library: str | None) -> None:
    with running(library=library) as (arena, process):
        assert process.ready.kernel == ("reference" if library is None else "native")
        parameter = torch.randn(NUMEL).requires_grad_()
        arena.tensor("p").copy_(parameter.detach())
        parameter.grad = torch.randn(NUMEL).bfloat16().float()
        arena.tensor("g").copy_(parameter.grad)
        process.submit([PASS])
        done = process.wait()
        assert (done.number, done.seconds > 0) == (1, True)
        torch.optim.AdamW([parameter], lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1).step()
        torch.testing.assert_close(arena.tensor("p"), parameter.detach(), rtol=2e-6, atol=1e-8)
        assert torch.equal(arena.tensor("y"), arena.tensor("p").bfloat16())


def test_one_wait_covers_all_submissions() -> None:
    with running() as (arena, process):
        zeros = torch.zeros_like(arena.tensor("m"))
        arena.tensor("m").fill_(1.0)
        # p and the gradient, whose place y takes, stay zero: the learning rate is zero
        for _ in range(3):
            process.submit([replace(PASS, step=replace(STEP, lr=0.0))])
        assert process.wait().number == 3
        assert torch.allclose(arena.tensor("m"), torch.tensor(0.9**3))
        assert torch.equal(arena.tensor("p"), zeros)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("library", [library_path(), None])
def test_a_limit_of_threads_in_between_changes_no_bit(library: str | None) -> None:
    found = []
    for limits in ((), (1, 3, 2, 99, 1)):
        with running(numel=3 * NUMEL, library=library, threads=3) as (arena, process):
            generator = torch.Generator().manual_seed(7)
            for number in range(5):
                if limits:
                    process.submit([ThreadLimit(limits[number])])
                arena.tensor("g").copy_(torch.randn(3 * NUMEL, generator=generator))
                process.submit([PASS])
                process.wait()
            found.append([arena.tensor(kind).clone() for kind in ("p", "m", "v", "y")])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def written_part(arena: Arena, offset: int) -> FilePart:
    """All of p, to be written at `offset`."""
    p = arena.tensor("p")
    begin = arena.find(p.data_ptr(), p.nbytes)
    assert begin is not None
    return FilePart(begin, p.nbytes, offset)


def test_a_file_gets_what_was_there_before_the_pass_that_follows(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"\xff" * 2 * NUMEL * 4)
    with running() as (arena, process):
        arena.tensor("p").copy_(before := torch.randn(NUMEL))
        arena.tensor("g").fill_(1.0)
        number = process.submit([ArenaWrite(str(path), (written_part(arena, NUMEL * 4),))])
        process.submit([PASS])
        process.wait_for_writes()
        assert process.wait_for_writes() == 0
        process.wait()
        assert process.failed_write(number) is None
        assert not torch.equal(arena.tensor("p"), before)
    content = path.read_bytes()
    assert content[: NUMEL * 4] == b"\xff" * NUMEL * 4
    assert torch.equal(
        torch.frombuffer(bytearray(content[NUMEL * 4 :]), dtype=torch.float32), before
    )


@pytest.mark.parametrize("path", ["no folder/file", "."])
def test_a_file_that_cannot_be_written_is_not_the_workers_end(path: str, tmp_path: Path) -> None:
    with running() as (arena, process):
        number = process.submit([ArenaWrite(str(tmp_path / path), (written_part(arena, 0),))])
        process.submit([PASS])
        done = process.wait()
        assert done.number == number + 1
        assert "Error" in (process.failed_write(number) or "")
        assert process.failed_write(number + 1) is None


def test_an_answer_begins_the_timeout_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """A long queue of work that advances is not a silent worker: 0.9 s pass before each of four
    answers, by a clock that the test sets."""
    clock = SimpleNamespace(now=0.0)
    arriving, first = [0], Channel.first

    def first_that_arrived(self: Channel) -> Any | None:
        return first(self) if process._done < arriving[0] else None

    def pass_time(self: Channel, patience: Patience) -> None:
        """The trainer's wait: time passes, and then the next answer is there."""
        if process._done < arriving[0]:
            poller = select.poll()
            poller.register(self._end, select.POLLIN)
            poller.poll(60_000)
            return
        for _ in range(9):
            patience.begin_slice()
            clock.now += 0.1
            patience.end_slice()
        arriving[0] += 1

    with running() as (_, process):
        process._timeout_seconds = 1.0  # of what follows, not of the start
        # before the first answer can come, which a submission may read
        monkeypatch.setattr(Channel, "first", first_that_arrived)
        for _ in range(4):
            process.submit([])
        monkeypatch.setattr(messages, "time", SimpleNamespace(monotonic=lambda: clock.now))
        monkeypatch.setattr(Channel, "idle", pass_time)
        process.wait()
        assert clock.now == pytest.approx(4 * 0.9)


def submit_and_wait(process: OptimizerProcess, task: WorkerTask) -> None:
    """Both may raise the worker's error: a fast worker answers before `submit` returns."""
    process.submit([task])
    process.wait()


def test_work_that_could_not_be_sent_is_not_awaited() -> None:
    with running(timeout_seconds=5.0) as (_, process):
        with pytest.raises(Exception, match="pickle"):
            process.submit([replace(PASS, slot=threading.Lock())])  # type: ignore[arg-type]
        assert process.wait().number == 0
        process.submit([PASS])
        assert process.wait().number == 1


def test_an_exception_of_the_worker_is_raised_in_the_trainer() -> None:
    with running() as (_, process):
        with pytest.raises(
            WorkerError, match=r"(?s)rank 3.*pid.*KeyError: ArrayKey\(.*slot=7\).*checkpoint"
        ):
            submit_and_wait(process, replace(PASS, slot=7))
        assert gone(process.pid)


@pytest.mark.parametrize(
    ("timeout_seconds", "given", "writes", "says"),
    [
        (0.3, 0.0, False, r"0\.3 s \(zenflow.worker_timeout_seconds = 0\.3\)\. It may be stopped"),
        (
            0.3,
            0.6,
            True,
            r"0\.6 s\. It may still be writing a checkpoint .*: save to another one\.",
        ),
        (0.6, 0.3, True, r"0\.6 s \(zenflow.worker_timeout_seconds = 0\.6\).*: raise the timeout"),
    ],
)
def test_a_stopped_worker_times_out_and_is_killed(
    timeout_seconds: float, given: float, writes: bool, says: str, tmp_path: Path
) -> None:
    """By the longer limit, which the error names with its remedy; the config can change only one of
    them."""
    with running() as (_, process):
        process._timeout_seconds = timeout_seconds
        os.kill(process.pid, signal.SIGSTOP)
        task = ArenaWrite(str(tmp_path / "file"), ()) if writes else PASS
        number = process.submit([task])
        with pytest.raises(WorkerError, match=rf"did not answer within {says}"):
            process.wait_for(number, given)
        assert gone(process.pid)


def test_a_submission_that_is_not_read_times_out() -> None:
    """A message larger than the socket's buffer would otherwise block forever."""
    with running() as (_, process):
        process._timeout_seconds = 0.5
        os.kill(process.pid, signal.SIGSTOP)
        with pytest.raises(
            WorkerError, match=r"did not accept its work within 0\.5 s.*worker_timeout_seconds"
        ):
            process.submit([replace(PASS, partition=index) for index in range(20_000)])
        assert gone(process.pid)


def test_time_in_which_a_job_was_suspended_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trainer and worker stop together, and the trainer may continue first: then the worker has ten
    seconds, by a clock that the test sets."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(messages, "time", SimpleNamespace(monotonic=lambda: clock.now))
    outer = Patience(5.0)
    patience = Patience(1.0, outer)

    def spend(seconds: float) -> None:
        patience.begin_slice()
        clock.now += seconds
        patience.end_slice()

    spend(3600.0)
    for _ in range(19):
        spend(0.5)
    assert not patience.is_over
    assert not outer.is_over
    spend(0.6)
    assert patience.is_over


def test_two_threads_can_wait() -> None:
    found: list[int] = []
    with running() as (_, process):

        def wait() -> None:
            found.append(process.wait().number)

        for number in range(1, 6):
            os.kill(process.pid, signal.SIGSTOP)
            process.submit([PASS])
            threads = [threading.Thread(target=wait) for _ in range(2)]
            for thread in threads:
                thread.start()
            os.kill(process.pid, signal.SIGCONT)
            for thread in threads:
                thread.join()
            assert found[-2:] == [number] * 2
    assert len(found) == 10


def test_a_signal_handler_can_wait_while_its_thread_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    with running() as (_, process):
        found = []

        def handle(*_: object) -> None:
            if process._is_inside:  # refused, as shown below
                signal.setitimer(signal.ITIMER_REAL, 0.01)
                return
            os.kill(process.pid, signal.SIGCONT)
            found.append(process.wait().number)

        before = signal.signal(signal.SIGALRM, handle)
        try:
            os.kill(process.pid, signal.SIGSTOP)
            process.submit([PASS])
            signal.setitimer(signal.ITIMER_REAL, 0.2)
            assert process.wait().number == 1
        finally:
            signal.signal(signal.SIGALRM, before)
        assert found == [1]
        with process._alone(), pytest.raises(WorkerError, match="signal handler"):
            process.wait()
        process.submit([PASS])
        assert process.wait().number == 2
