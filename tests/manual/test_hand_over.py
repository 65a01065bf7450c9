"""The example that hands tensors to another process, through memory without a name."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import sys
from collections.abc import Iterator
from multiprocessing.connection import Connection

import pytest
import torch

from tests.support.paths import ROOT
from tests.support.same import assert_same

sys.path.insert(0, str(ROOT / "examples"))
from hand_over import hand_over, receive

BUCKET = 1000


def tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    """Several dtypes and shapes; one empty, one without dimensions, one larger than a bucket."""
    generator = torch.Generator().manual_seed(seed)
    found = {f"w{n}": torch.randn(n, 7, generator=generator).bfloat16() for n in range(12)}
    found["large"] = torch.randn(40, 30, generator=generator)
    found["scalar"] = torch.tensor(3)
    found["turned"] = torch.randn(5, 6, generator=generator).t()
    return found


def reads(connection: Connection) -> None:
    """Return each handover, and end when told to; a stub of an inference engine."""
    torch.set_num_threads(1)
    while (order := connection.recv()) != "end":
        received = receive(connection)
        if order == "stop":
            next(received)
            del received  # which ends it
            continue
        if order == "die":
            next(received)
            os._exit(1)
        try:
            connection.send({name: tensor.clone() for name, tensor in received})
        except RuntimeError as error:
            connection.send(str(error))


@pytest.fixture
def reader() -> Iterator[Connection]:
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=reads, args=(theirs,))
    process.start()
    theirs.close()
    yield ours
    if process.is_alive():
        with contextlib.suppress(OSError):
            ours.send("end")
    process.join()
    ours.close()


def fails_after(count: int) -> Iterator[tuple[str, torch.Tensor]]:
    for number, each in enumerate(tensors().items()):
        if number == count:
            raise OSError("no such weight")
        yield each


def test_another_process_gets_the_same_bits_and_nothing_is_left(reader: Connection) -> None:
    before = sorted(os.listdir("/dev/shm")), len(os.listdir("/proc/self/fd"))
    for seed in (0, 1):  # the connection is used again
        reader.send("read")
        hand_over(tensors(seed).items(), reader, BUCKET)
        assert_same(tensors(seed), reader.recv())
    reader.send("read")
    with pytest.raises(OSError, match="no such weight"):
        hand_over(fails_after(9), reader, BUCKET)
    assert "has failed" in reader.recv()
    reader.send("stop")
    with pytest.raises(RuntimeError, match="has stopped before the last"):
        hand_over(tensors().items(), reader, BUCKET)
    reader.send("die")
    with pytest.raises(RuntimeError, match="has ended or closed the connection"):
        hand_over(tensors().items(), reader, BUCKET)
    assert (sorted(os.listdir("/dev/shm")), len(os.listdir("/proc/self/fd"))) == before


def test_a_rank_that_gets_nothing_only_iterates() -> None:
    stream = iter(tensors().items())
    hand_over(stream, None)
    assert next(stream, None) is None


def test_the_sender_that_ends_is_an_error_of_the_receiver() -> None:
    ours, theirs = multiprocessing.Pipe()
    ours.close()
    with pytest.raises(RuntimeError, match="has ended before the last"):
        list(receive(theirs))
    theirs.close()
