"""A user's training script with one rank. Its first argument says how it ends, its second is a
folder.

Prints a line of JSON when it trains: its worker's process id and kernel. With DSEXT_TEST_DEVICE=sim
it does so on the simulated accelerator. Run by `test_trainer` and `test_bare_machine`.
"""

import importlib
import json
import multiprocessing
import os
import signal
import sys
import threading
from typing import Any

import torch

from deepspeed_ext.runtime import files as _files
from deepspeed_ext.zenflow.worker.process import OptimizerProcess
from tests.support.models import batches, on_device
from tests.support.waiting import wait_to_be_killed
from tests.support.zenflow import make_engine, train, zenflow_config

STEPS = 5

preempted = threading.Event()
alive: list[Any] = []


def announce(pid: int, **what: object) -> None:
    sys.stdout.write(json.dumps({"worker": pid, **what}) + "\n")
    sys.stdout.flush()


def announce_at_launch() -> None:
    """Say so as soon as the worker's process exists, and wait there to be killed."""
    launch = OptimizerProcess._launch

    def launch_and_wait(self, *args):
        process, connection = launch(self, *args)
        announce(process.pid)
        wait_to_be_killed()
        return process, connection

    OptimizerProcess._launch = launch_and_wait  # type: ignore[method-assign]


def slow_disk() -> threading.Event:
    """Files reach the disk once the event is set."""
    arrives, sync = threading.Event(), _files.sync_file

    def wait_and_sync(path: str) -> None:
        if threading.current_thread() is not threading.main_thread():
            arrives.wait()
        sync(path)

    _files.sync_file = wait_and_sync
    return arrives


def interrupt_each_wait(process: OptimizerProcess, arrives: threading.Event, times: int) -> None:
    """Ctrl-C comes whenever this process waits for a save, so often; then the disk goes on."""
    wait, left = process.wait_for_writes, [times]

    def wait_or_be_interrupted(*within: Any) -> float:
        if left[0] == 0:
            arrives.set()
            return wait(*within)
        left[0] -= 1
        signal.raise_signal(signal.SIGINT)
        raise AssertionError("not interrupted")

    process.wait_for_writes = wait_or_be_interrupted  # type: ignore[assignment,method-assign]


def save_and_end(engine: Any, end: str) -> None:
    """No step follows the save; in one case the engine is collected as garbage, in the others it
    lives to the end."""
    if not end.startswith("saving"):
        return
    arrives = slow_disk() if "interrupted" in end else None
    engine.save_checkpoint(sys.argv[2], tag="last")
    if arrives is not None:
        interrupt_each_wait(
            engine.optimizer.host_optimizer.link.process, arrives, 2 if "twice" in end else 1
        )
        engine.destroy()
    if end != "saving":
        alive.append(engine)
        torch.distributed.destroy_process_group()
    if end == "saving before a mistake":
        raise RuntimeError("a mistake of the user's")


def main(end: str) -> None:
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    backend = "gloo"
    if os.environ.get("DSEXT_TEST_DEVICE") == "sim":
        importlib.import_module("tests.support.simulated_accelerator.accelerator").install()
        backend = "sim"
    torch.distributed.init_process_group(
        backend, store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    if end == "starting":
        announce_at_launch()
    engine = make_engine(zenflow_config(2, async_save=end.startswith("saving")))
    losses = train(engine, batches(STEPS, 0))
    process = engine.optimizer.host_optimizer.link.process
    if end == "destroy":
        engine.destroy()
    announce(process.pid, kernel=process.ready.kernel, losses=losses)
    if end == "idle":
        wait_to_be_killed()
    elif end == "stepping":
        os.kill(process.pid, signal.SIGSTOP)  # whatever it does then is never done
        train(engine, batches(1, 0))
        wait_to_be_killed()
    elif end == "exception":
        loss = engine(on_device(batches(1, 1)[0]))
        engine.backward(loss)
        raise RuntimeError("a mistake of the user's")
    elif end == "interrupt":
        while True:
            train(engine, batches(10, 0))
    elif end == "preempted":
        while not preempted.is_set():
            train(engine, batches(1, 0))
        engine.save_checkpoint(sys.argv[2], tag="last")
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)
    else:
        save_and_end(engine, end)


if __name__ == "__main__":
    if sys.argv[1] == "preempted":
        signal.signal(signal.SIGTERM, lambda *_: preempted.set())
    # a shell lets its background jobs ignore it
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if sys.argv[1] == "in a thread":
        thread = threading.Thread(target=main, args=["idle"])
        thread.start()
        thread.join()
    if sys.argv[1] == "saving in a forked process":  # as in a notebook
        forked = multiprocessing.get_context("fork").Process(target=main, args=sys.argv[1:2])
        forked.start()
        forked.join()
        sys.exit(forked.exitcode)
    main(sys.argv[1])
