"""The optimizer's state is compared with what each limit leaves to all ranks that share it."""

import threading
from collections.abc import Sequence
from typing import TypeVar
from unittest.mock import patch

import pytest

from deepspeed_ext.errors import OutOfMemoryError
from deepspeed_ext.runtime import host_memory as memory
from deepspeed_ext.runtime.ranks import RankGroup
from deepspeed_ext.zenflow.step import link
from tests.support.thread_ranks import run_together

MIB = 1 << 20
ValueT = TypeVar("ValueT")


def compare(needed: int, rooms: Sequence[dict[str, int]], hosts: Sequence[str]) -> list[str]:
    """What each rank says, if each needs `needed` bytes."""
    ranks_of_threads: dict[int, int] = {}

    def own(values: Sequence[ValueT]) -> ValueT:
        return values[ranks_of_threads[threading.get_ident()]]

    def body(ranks: RankGroup) -> str:
        ranks_of_threads[threading.get_ident()] = ranks.rank
        try:
            link._require_room(needed, ranks)
        except OutOfMemoryError as error:
            return str(error)
        return ""

    with (
        patch.object(memory, "available_by_limit", lambda: own(rooms)),
        patch.object(link, "host_id", lambda: own(hosts)),
    ):
        return run_together(len(rooms), body)


def below(job: int, task: int) -> list[dict[str, int]]:
    """Four ranks in control groups of their own, below one group."""
    return [{"machine": 99 * MIB, "job": job * MIB, f"task {rank}": task * MIB} for rank in range(4)]


@pytest.mark.parametrize(
    ("rooms", "hosts", "says"),
    [
        ([{"machine": 40 * MIB}] * 4, "aaaa", ""),
        ([{"machine": 39 * MIB}] * 4, "aaaa", "for 4 rank(s) on one host, but 40,894,464 are available"),
        ([{"machine": 39 * MIB}] * 4, "aabb", ""),
        (below(job=40, task=10), "aaaa", ""),
        (below(job=39, task=10), "aaaa", "for 4 rank(s)"),
        (below(job=40, task=9), "aaaa", "for 1 rank(s)"),
    ],
)
def test_ranks_are_added_up_below_each_limit_that_they_share(
    rooms: list[dict[str, int]], hosts: str, says: str
) -> None:
    told = compare(10 * MIB, rooms, hosts)
    assert len(set(told)) == 1
    assert says in told[0]
    assert bool(says) == bool(told[0])
