"""Ranks that are forked and talk over pipes: hundreds of them in the time in which one process
imports torch."""

from __future__ import annotations

import os
import pickle
import signal
import socket
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch

from deepspeed_ext.runtime.ranks import RankGroup
from tests.support.thread_ranks import GatheringRanks

__all__ = ["PeerGoneError", "run_forked"]

SECONDS = 30


class PeerGoneError(RuntimeError):
    """Another rank has ended inside a collective; what a process group raises then."""


class Pipe:
    """Every collective goes through the parent, which gathers one value of each rank."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def gather(self, rank: int, value: Any) -> list[Any]:
        try:
            self._connection.send(value)
            return self._connection.recv()
        except (EOFError, OSError):
            raise PeerGoneError("connection closed by peer") from None


def run_forked(size: int, body: Callable[[RankGroup], Any]) -> list[Any]:
    """Run `body` on `size` forked ranks; returns what each returned, an exception, or None for one
    that was killed."""
    pids, connections = [], []
    for rank in range(size):
        ours, theirs = socket.socketpair()
        pid = os.fork()
        if pid == 0:
            ours.close()
            _child(rank, size, Connection(theirs.detach()), body)
        theirs.close()
        pids.append(pid)
        connections.append(Connection(ours.detach()))
    results = _serve(connections)
    for pid in pids:
        os.waitpid(pid, 0)
    return results


def _child(rank: int, size: int, connection: Connection, body: Callable[[RankGroup], Any]) -> None:
    signal.alarm(SECONDS)  # a rank that hangs is killed, and its result is None
    group = GatheringRanks(Pipe(connection), rank, size, torch.device("cpu"))
    try:
        result: Any = body(group)
    except PeerGoneError as error:
        result = error
    except Exception:
        result = RuntimeError(traceback.format_exc())
    try:
        connection.send(("result", pickle.dumps(result)))
    finally:
        os._exit(0)


def _serve(connections: list[Connection]) -> list[Any]:
    """Carry out collectives until every rank has sent its result or is gone."""
    results: list[Any] = [None] * len(connections)
    live = set(range(len(connections)))
    while live:
        values: dict[int, Any] = {}
        for rank in sorted(live):
            try:
                said = connections[rank].recv()
            except (EOFError, OSError):
                live.discard(rank)
                connections[rank].close()
                continue
            if isinstance(said, tuple) and len(said) == 2 and said[0] == "result":
                results[rank] = pickle.loads(said[1])
                live.discard(rank)
                connections[rank].close()
            else:
                values[rank] = said
        for rank in values:
            if len(values) < len(connections):
                connections[rank].close()  # a peer is gone: this rank's collective fails
                live.discard(rank)
            else:
                try:
                    connections[rank].send([values[other] for other in sorted(values)])
                except OSError:  # killed by a call of another thread, while it waited here
                    live.discard(rank)
                    connections[rank].close()
    return results
