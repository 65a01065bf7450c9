"""Layouts and copies as plain arithmetic: whatever two layouts are, every element arrives where it
belongs."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deepspeed_ext.adapter import saved_checkpoint
from deepspeed_ext.adapter.saved_checkpoint import MASTER, SavedPartitions, load_frozen
from deepspeed_ext.checkpoint.layout import Layout, Placement
from deepspeed_ext.errors import CheckpointError

SIZES = st.lists(st.integers(1, 40), min_size=1, max_size=6)
RANKS = st.integers(1, 5)


def groups_of(sizes: list[int], cuts: list[int]) -> list[dict[str, int]]:
    """Parameters of these sizes, in as many groups as there are cuts, plus one."""
    names = [f"p{index}" for index in range(len(sizes))]
    borders = sorted({0, len(sizes), *(cut % len(sizes) for cut in cuts)})
    return [dict(zip(names[a:b], sizes[a:b], strict=True)) for a, b in pairwise(borders)]


@st.composite
def layouts(draw: st.DrawFn, sizes: list[int]) -> Layout:
    """One of any stage."""
    ranks = draw(RANKS)
    groups = groups_of(sizes, draw(st.lists(st.integers(0, 10), max_size=2)))
    if draw(st.booleans()):
        return Layout.of_sub_groups(groups, ranks)
    paddings = [[draw(st.integers(0, 3)) for _ in group] for group in groups]
    wholes = [
        sum(group.values()) + sum(behind) for group, behind in zip(groups, paddings, strict=True)
    ]
    parts = [-(-whole // ranks) + draw(st.integers(0, 3)) for whole in wholes]
    return Layout.of_groups(groups, paddings, parts, ranks)


def filled(layout: Layout, rank: int) -> dict[tuple[int, int], tuple[str, int]]:
    """What lies at each place of a rank's flat tensors: name of the parameter and number of the
    element."""
    found = {}
    for name, placement in layout.placements.items():
        for element in range(placement.numel):
            owner, inside = divmod(placement.start + element, placement.stride)
            if owner == rank:
                place = (placement.flat, placement.base + inside)
                assert place not in found, "two elements at one place"
                found[place] = (name, element)
    return found


@given(st.data())
def test_every_element_arrives_where_it_belongs(data: st.DataObject) -> None:
    sizes = data.draw(SIZES)
    saved, wanted = data.draw(layouts(sizes)), data.draw(layouts(sizes))
    there = [filled(saved, rank) for rank in range(saved.ranks)]
    for rank in range(wanted.ranks):
        arrived = {}
        for source, here in wanted.copies(saved, rank):
            for step in range(source.end - source.begin):
                place = here.offset + source.begin - here.begin + step
                arrived[here.flat, place] = there[source.rank][source.flat, source.offset + step]
        assert arrived == filled(wanted, rank)


@given(st.data())
def test_fragments_are_the_parameter_in_order(data: st.DataObject) -> None:
    layout = data.draw(layouts(data.draw(SIZES)))
    for placement in layout.placements.values():
        pieces = list(placement.fragments(0, placement.numel))
        assert [element for piece in pieces for element in range(piece.begin, piece.end)] == list(
            range(placement.numel)
        )
        assert [piece.rank for piece in pieces] == sorted({piece.rank for piece in pieces})
        for rank in range(layout.ranks):
            held = placement.of_rank(rank)
            assert held == next((piece for piece in pieces if piece.rank == rank), None)


def test_another_model_is_named_by_three_parameters_and_a_count() -> None:
    mine = Layout(1, {"same": Placement(4, 0, 0, 9, 0), "other": Placement(5, 0, 4, 9, 0)})
    theirs = Layout(1, {"same": Placement(3, 0, 0, 9, 0), "old": Placement(5, 0, 4, 9, 0)})
    with pytest.raises(
        CheckpointError,
        match=r"old is only in the checkpoint; other is not in the checkpoint; same has 4 elements",
    ):
        mine.require_same_parameters(theirs)
    many = Layout.of_sub_groups([{f"p{number}": 4 for number in range(9)}], 2)
    with pytest.raises(CheckpointError, match=r"(.*is not in the checkpoint){3}, and 6 more\. Res"):
        many.require_same_parameters(Layout(2, {}))


@pytest.mark.parametrize("where", ["nowhere", "in the checkpoint", "here"])
def test_a_frozen_weight_that_is_quantized_is_refused(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its file has no scale (`zero_quantized_nontrainable_weights`)."""
    monkeypatch.setattr(saved_checkpoint, "is_stored_quantized", lambda param: where == "here")
    param: Any = torch.nn.Parameter(torch.zeros(4), requires_grad=False)
    saved = torch.arange(4, dtype=torch.int8 if where == "in the checkpoint" else torch.float32)
    checkpoint: Any = SimpleNamespace(
        frozen=lambda name: Placement(4, 0, 0, 4, 0), frozen_part=lambda name, rank: saved
    )
    target: Any = SimpleNamespace(is_sharded=False)
    if where == "nowhere":
        assert load_frozen(checkpoint, target, "w", param)
        assert torch.equal(param, saved)
    else:
        with pytest.raises(CheckpointError, match="w is quantized"):
            load_frozen(checkpoint, target, "w", param)


@pytest.mark.parametrize(
    ("names", "fits"),
    [("abc", True), ("xyz", True), ("abz", True), ("bac", False), ("baz", False), ("ab", False)],
)
def test_partitions_fit_under_new_names_but_not_under_swapped_ones(names: str, fits: bool) -> None:
    saved = Layout.of_sub_groups([dict.fromkeys("abc", 6)], 2)
    assert Layout.of_sub_groups([dict.fromkeys(names, 6)], 2).fits(saved) is fits
    assert not Layout.of_sub_groups([dict.fromkeys(names, 6)], 3).fits(saved)


@pytest.mark.parametrize(
    ("groups", "expected"), [([[0, 1], [2]], [0, 0, 1]), ([[1], [2], [0]], [0, 1, 2])]
)
def test_each_flat_tensor_belongs_to_the_group_that_lists_it(
    groups: list[list[int]], expected: list[int]
) -> None:
    """At stage 3 a group of parameters has several sub-groups."""
    base = {
        "state": {number: {"step": number} for number in range(3)},
        "param_groups": [{"params": params} for params in groups],
    }
    state = {
        "zero_stage": 3,
        "fp32_flat_groups": [torch.zeros(2) for _ in range(3)],
        "optimizer_state_dict": base,
    }
    file: Any = SimpleNamespace(path="file", content={"optimizer_state_dict": state})
    saved = SavedPartitions(file)
    assert saved.group_of_flats == expected
    order = [number for params in groups for number in params]
    assert [scalars["step"] for scalars in saved.scalars] == order


def test_partitions_with_different_states_do_not_fit_together() -> None:
    master = torch.zeros(0)
    tensors = [{MASTER: master, "exp_avg": master}, {MASTER: master}]
    saved: Any = SimpleNamespace(
        folder="tag",
        layout=Layout(1, {}, [(0, 0), (0, 0)]),
        partitions=lambda rank: SimpleNamespace(tensors=tensors, require=lambda *args: None),
        require_complete=lambda: None,
    )
    target: Any = SimpleNamespace(layout=Layout(1, {}), rank=0)
    with pytest.raises(CheckpointError, match="different optimizer states"):
        saved_checkpoint.Resharding(saved, target, ())
