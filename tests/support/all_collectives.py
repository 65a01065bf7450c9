"""Every collective that the package calls, called as it does, on the device and backend of any
number of ranks.

With one rank, the package skips them. `ranks_that_communicate` gives a group of one that does not.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import pytest
import torch
from deepspeed.accelerator import get_accelerator

from deepspeed_ext.adapter.gather_hooks import FetchedParameter, GatherHandle
from deepspeed_ext.adapter.weight_stream import _Entry, _Exchange
from deepspeed_ext.checkpoint.layout import Placement
from deepspeed_ext.cores.binding import agree, report_rank
from deepspeed_ext.cores.plan import PlanRequest
from deepspeed_ext.errors import CheckpointError, PlanMismatchError
from deepspeed_ext.flatten import tiers
from deepspeed_ext.flatten.layout import GroupLayout
from deepspeed_ext.gather.launch import can_group, gather_singles, gather_together
from deepspeed_ext.runtime.ranks import (
    RankGroup,
    communicating_on_host,
    raise_together,
    require_same_plan,
)
from tests.support.paths import ROOT
from tests.support.same import first_difference

PACKAGE = ROOT / "deepspeed_ext"
COLLECTIVES = frozenset(
    {
        "all_reduce",
        "all_gather_into_tensor",
        "all_gather_single",
        "allgather_fn",
        "batch_isend_irecv",
        "broadcast",
    }
)
OBJECTS = "broadcast_object_list"
NOT_HERE = ("commands", "verify.py")
"""A command with ranks of its own, which has its own tests."""
DTYPES = (torch.bfloat16, torch.float32, torch.int8)


class _One(int):
    """1 for arithmetic, but never equal to 1: nothing takes it for a group that has nobody to talk
    to."""

    def __eq__(self, other: object) -> bool:
        return False

    def __ne__(self, other: object) -> bool:
        return True

    def __gt__(self, other: int) -> bool:
        return other <= 1

    __hash__ = int.__hash__


class _Divided(RankGroup):
    """Ranks whose values are never equal, so that all of them are exchanged."""

    def equal(self, value: Any) -> bool:
        return super().equal(value) and False


def ranks_that_communicate(kind: type[RankGroup] = RankGroup) -> RankGroup:
    """All ranks of this process's group, on its device; a group of one communicates too."""
    found = RankGroup.of(None, keeps_scratch=True)
    size = _One(1) if found.size == 1 else found.size
    return kind(found.group, found.rank, size, found.device, found.scratch)


def same(expected: Any, actual: Any, what: str) -> None:
    found = first_difference(expected, actual, what)
    assert not found, found


# -- one function for each way to communicate ------------------------------------------------------


def agreement(ranks: RankGroup) -> None:
    assert ranks.minimum(ranks.rank + 5, -7) == (5, -7)
    assert ranks.minimum(*range(20)) == tuple(range(20)), "more than the scratch holds"
    assert ranks.all(True)
    assert not ranks.all(ranks.rank != 0)
    assert ranks.equal("a plan")
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.uint8):
        mine = torch.arange(6, device=ranks.device).view(2, 3).to(dtype) + ranks.rank
        expected = torch.stack([mine - ranks.rank + rank for rank in range(ranks.size)])
        same(expected, ranks.all_gather(mine), f"all_gather of {dtype}")


def objects(ranks: RankGroup) -> None:
    last = int(ranks.size) - 1
    assert ranks.broadcast({"from": ranks.rank}, last) == {"from": last}
    found = ranks_that_communicate(_Divided).distinct(f"value {ranks.rank}")
    assert found == [(f"value {rank}", [rank]) for rank in range(ranks.size)]
    # Of a number of bytes that no word divides.
    assert ranks.gather_objects("x" * (5 + ranks.rank)) == [
        "x" * (5 + rank) for rank in range(ranks.size)
    ]


def errors(ranks: RankGroup) -> None:
    assert raise_together(ranks, None, flag=ranks.rank == 0)
    mine = KeyError("a") if ranks.rank == 0 else None
    with pytest.raises(CheckpointError, match="rank 0: KeyError: 'a'"):
        raise_together(ranks, mine, CheckpointError)
    require_same_plan("a test", {"is": "equal"}, ranks)
    if int(ranks.size) > 1:  # one rank's plan differs from none
        with pytest.raises(PlanMismatchError, match="different plans for a test"):
            require_same_plan("a test", ranks.rank, ranks)


def core_plan(ranks: RankGroup) -> None:
    report, topology, _ = report_rank(ranks.rank, ranks.rank)
    assert agree(report, topology, ranks, PlanRequest()).leads_host == (ranks.rank == 0)


def partitioned(values: torch.Tensor, ranks: RankGroup) -> FetchedParameter:
    """A parameter of which each rank holds its part, as DeepSpeed keeps it."""
    length = -(-values.numel() // ranks.size)
    padded = torch.nn.functional.pad(values, (0, length * ranks.size - values.numel()))
    part = padded[ranks.rank * length : (ranks.rank + 1) * length].to(ranks.device)
    parameter: Any = SimpleNamespace(
        ds_numel=values.numel(), ds_shape=values.shape, ds_tensor=part, ds_id=0
    )
    return FetchedParameter(values.numel(), part, values.dtype, parameter=parameter)


def single_parameters(ranks: RankGroup) -> None:
    """Each to its own storage: in one launch of bytes if the backend can, and one after the
    other."""
    values = [(torch.arange(numel) % 100).to(dtype) for dtype in DTYPES for numel in (1, 37, 1024)]
    for grouped in {False, can_group(ranks)}:
        pending = [partitioned(value, ranks) for value in values]
        pending[0].dtype = torch.float32  # it is cast into its place, and gathered in place
        GatherHandle(gather_singles(pending, ranks, grouped), pending).wait()
        for value, each in zip(values, pending, strict=True):
            same(value, each.parameter.data, f"gathered, grouped: {grouped}")


def shared_bucket(ranks: RankGroup) -> None:
    odd = torch.tensor([-0.0, torch.nan, torch.inf, 1e-30])
    values = [odd, odd.bfloat16(), torch.arange(100, dtype=torch.int8)]
    pending = [partitioned(value, ranks) for value in values]
    GatherHandle([gather_together(pending, ranks)], pending).wait()
    for value, each in zip(values, pending, strict=True):
        raw = value.view(torch.uint8)
        same(
            raw, each.parameter.data.cpu().view(torch.uint8), f"{value.dtype} in a bucket, as bytes"
        )


def flat_buffer(ranks: RankGroup) -> None:
    """Slices of a flat buffer, in place: as suits the backend, and as suits others."""
    for way in (tiers.exchange_of(ranks), tiers.broadcasts, tiers.all_gather):
        for numel in (1, 1000):
            expected = torch.arange(ranks.size * numel, dtype=torch.float32)
            flat = torch.full_like(expected, torch.nan).to(ranks.device)
            own = slice(ranks.rank * numel, (ranks.rank + 1) * numel)
            flat[own] = expected[own].to(ranks.device)
            way(flat, ranks, 300)
            same(expected, flat, way.__name__)


def flattened(ranks: RankGroup) -> None:
    """Whole tiers, and the way back."""
    values = [torch.full((1000,), 1.0 + index) for index in range(3)]
    for on_host in (False, True):
        parameters = [torch.nn.Parameter(value.to(ranks.device)) for value in values]
        layout = GroupLayout.of(parameters, [0] * len(values), int(ranks.size) * 2)
        flat = tiers.from_slices(layout, ranks, 700, on_host=on_host)
        assert flat is not None
        same(torch.cat(values), flat[:3000], f"{on_host=}")
        own = flat.numel() // ranks.size
        for parameter in parameters:
            parameter.data = torch.empty(0, device=ranks.device)
        tiers.restore_parameters(
            layout, ranks, flat[ranks.rank * own : (ranks.rank + 1) * own].clone()
        )
        for value, parameter in zip(values, parameters, strict=True):
            same(value, parameter.detach(), f"restored after {on_host=}")


def weights_from_the_host(ranks: RankGroup) -> None:
    """Whole tensors of which each rank holds a part, on all ranks and on one, in a group of the
    host."""
    host = communicating_on_host(ranks.group)
    if host.size == 1:
        host = replace(host, size=_One(1))
    names, numel = ("weight",), 1000
    values = torch.arange(numel, dtype=torch.float32)
    placed = Placement.of_one(numel, int(host.size))
    flat = torch.zeros(-(-numel // int(host.size)))
    for fragment in placed.fragments(0, numel):
        if fragment.rank == host.rank:
            span = slice(fragment.offset, fragment.offset + fragment.end - fragment.begin)
            flat[span] = values[fragment.begin : fragment.end]
    entry = _Entry(
        names,
        values.shape,
        torch.bfloat16,
        tuple(placed.fragments(0, numel)),
        lambda fragment: flat[fragment.offset :][: fragment.end - fragment.begin],
    )
    for on_rank in (None, int(host.size) - 1):
        exchange = _Exchange([entry], host, on_rank)
        exchange.prepare()
        for found, whole in exchange.run():
            assert found == names
            same(values.bfloat16(), whole, f"weights on rank {on_rank}")


WAYS: dict[str, Callable[[RankGroup], None]] = {
    way.__name__: way
    for way in (
        agreement,
        objects,
        errors,
        core_plan,
        single_parameters,
        shared_bucket,
        flat_buffer,
        flattened,
        weights_from_the_host,
    )
}


def communicate(way: str) -> str:
    """The body of a rank: one of `WAYS`; returns the name of the backend."""
    ranks = ranks_that_communicate()
    WAYS[way](ranks)
    get_accelerator().synchronize()
    return str(ranks.backend.name()).lower()


# -- which collectives that reaches ----------------------------------------------------------------


def places() -> set[str]:
    """Every call of a collective in the package, as file and line."""
    return {
        f"{path.relative_to(PACKAGE)}:{node.lineno}"
        for path in PACKAGE.rglob("*.py")
        if path.relative_to(PACKAGE).parts[:2] != NOT_HERE
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and _is_collective(node.func)
    }


def _is_collective(function: ast.expr) -> bool:
    if isinstance(function, ast.Name):
        return function.id == "all_gather_single"
    return (
        isinstance(function, ast.Attribute)
        and function.attr in {*COLLECTIVES, OBJECTS}
        and ast.unparse(function.value) in ("dist", "torch.distributed")
    )


def reached() -> set[str]:
    """The body of a rank: the lines of the package that `WAYS` run, as file and line."""
    with _lines() as lines:
        for way in WAYS:
            communicate(way)
    return lines


@contextmanager
def _lines() -> Iterator[set[str]]:
    found: set[str] = set()

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        path = Path(frame.f_code.co_filename)
        if PACKAGE not in path.parents:
            return None
        if event == "line":
            found.add(f"{path.relative_to(PACKAGE)}:{frame.f_lineno}")
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield found
    finally:
        sys.settrace(before)
