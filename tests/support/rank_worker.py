"""One rank of `tests.support.ranks`: joins the process group, then runs the bodies that arrive on
its connection."""

import ctypes
import faulthandler
import gc
import importlib
import io
import os
import pickle
import random
import signal
import sys
import traceback
from datetime import timedelta
from functools import reduce
from multiprocessing.connection import Connection
from typing import Any

from tests.support.worker_nursery import FORKS_WORKERS, fork_workers, prepare

PR_SET_PDEATHSIG = 1


def _join_group() -> None:
    import deepspeed
    import torch
    from deepspeed.accelerator import get_accelerator
    from torch.distributed import distributed_c10d

    from deepspeed_ext.adapter.upstream import no_shared_buffers, swapped
    from tests.support.gloo import await_every_gather
    from tests.support.shared_device import BACKEND, share_devices

    accelerator = get_accelerator()
    world_size = int(os.environ["WORLD_SIZE"])
    backend = "gloo"
    if accelerator.device_name() != "cpu":
        shares = accelerator.device_count() < world_size
        if shares:
            share_devices()
        backend = os.environ.get(BACKEND) or accelerator.communication_backend_name()
        get_accelerator().set_device(int(os.environ["LOCAL_RANK"]))
    timeout = timedelta(seconds=float(os.environ["DSEXT_TEST_GROUP_TIMEOUT_SECONDS"]))
    # of the groups that DeepSpeed makes, too, among them its copy of the group of all ranks
    distributed_c10d.default_pg_timeout = distributed_c10d.default_pg_nccl_timeout = timeout
    torch.distributed.init_process_group(
        backend,
        init_method=f"file://{os.environ['DSEXT_TEST_RENDEZVOUS']}",
        rank=int(os.environ["RANK"]),
        world_size=world_size,
        timeout=timeout,
    )
    if backend == "sim":
        import tests.support.simulated_accelerator.simulation  # noqa: F401 - sets the order of tasks
    # the tests need none of them, and pools would even share them by name
    with swapped(no_shared_buffers()):
        deepspeed.init_distributed(dist_backend=backend)
    await_every_gather()
    if FORKS_WORKERS in os.environ:
        fork_workers()


def _reset() -> None:
    import torch

    random.seed(0)
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float32)
    gc.collect()
    gc.freeze()  # what is left is imported: no later collection has to walk it


def _run(task: bytes) -> tuple[object, str | None]:
    try:
        module, name, args, kwargs = pickle.loads(task)
        found: Any = importlib.import_module(module)
        body = reduce(getattr, name.split("."), found)
        value = body(*args, **kwargs)
        _fail_on_races()
        return value, None
    except BaseException:
        return None, traceback.format_exc()


def _fail_on_races() -> None:
    """On the simulated accelerator, whatever the values were, no two tasks may have touched memory
    without an order."""
    simulation = sys.modules.get("tests.support.simulated_accelerator.simulation")
    races = [] if simulation is None else simulation.found_races()
    if races:
        raise AssertionError(f"{len(races)} races, of which the first: {races[0].text}")


class _AnswerPickler(pickle.Pickler):
    """Sends tensors as host tensors: the test session has no accelerator that could hold them."""

    def reducer_override(self, value: Any) -> Any:
        import torch

        if isinstance(value, torch.Tensor) and value.device.type != "cpu":
            return value.detach().cpu().__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        return NotImplemented


def _pickled(answer: tuple[Any, str | None]) -> bytes:
    file = io.BytesIO()
    _AnswerPickler(file, pickle.HIGHEST_PROTOCOL).dump(answer)
    return file.getvalue()


def main(connection_fd: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if FORKS_WORKERS in os.environ:
        prepare(connection_fd)
    faulthandler.register(signal.SIGUSR1)
    connection = Connection(connection_fd)
    try:
        _join_group()
        connection.send_bytes(pickle.dumps((None, None)))
    except BaseException:
        connection.send_bytes(pickle.dumps((None, traceback.format_exc())))
        raise
    while True:
        try:
            task = connection.recv_bytes()
        except (EOFError, ConnectionError):
            os._exit(
                0
                # the test session has ended; leave no time
                # to a process group that waits for its peers
            )
        _reset()
        answer = _run(task)
        try:
            message = _pickled(answer)
        except Exception:
            message = pickle.dumps(
                (None, "the return value cannot be pickled:\n" + traceback.format_exc())
            )
        connection.send_bytes(message)
        del answer, message


if __name__ == "__main__":
    main(int(sys.argv[1]))
