"""The shared arena: places never overlap, memory is really shared, and only touched pages cost."""

import os

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspeed_ext.zenflow.arena import Arena, ArraySpec, plan_layout
from deepspeed_ext.zenflow.messages import partition_specs
from deepspeed_ext.zenflow.predictive_schedule import ring_of

sizes = st.lists(
    st.tuples(st.sampled_from(["float32", "bfloat16", "float16"]), st.integers(0, 10_000)), min_size=1, max_size=20
)


@settings(deadline=None)
@given(sizes)
def test_places_are_aligned_and_apart(described: list[tuple[str, int]]) -> None:
    layout = plan_layout([ArraySpec(str(i), dtype, numel) for i, (dtype, numel) in enumerate(described)])
    end = 0
    for spec, offset in layout.places:
        assert offset >= end
        assert offset % (4096 if spec.nbytes >= 4096 else 64) == 0
        assert offset - end < 4096
        end = offset + spec.nbytes
    assert end <= layout.nbytes < end + 4096 + 1


def test_two_mappings_share_memory_and_tensors_outlive_the_arena() -> None:
    layout = plan_layout(
        [ArraySpec("a", "float32", 5), ArraySpec("b", "bfloat16", 7000), ArraySpec("none", "float32", 0)]
    )
    arena = Arena.create(layout)
    other = Arena.attach(os.dup(arena.fileno), layout)
    ours, theirs = arena.tensor("b"), other.tensor("b")
    ours.copy_(torch.arange(7000) % 250)
    assert torch.equal(theirs, (torch.arange(7000) % 250).to(torch.bfloat16))
    assert arena.array("b").address == ours.data_ptr()
    assert arena.tensor("none").numel() == 0
    arena.close(), arena.close(), other.close()
    del arena, other
    assert ours[249] == 249


def test_host_bytes_a_parameter() -> None:
    """12 (p, m, v) + 2 a place of the ring + 2 (y) + 4/32 (block means), by the pages that are touched."""
    n = 1 << 20
    how = {"block_size": 32, "grad_dtype": "bfloat16", "per_block": ("block_means", "float32")}
    for publish_dtype, interval, expected in (("bfloat16", 1, 16.125), ("float32", 1, 18.125), ("bfloat16", 4, 28.125)):
        layout = plan_layout(partition_specs(0, n, publish_dtype=publish_dtype, ring=ring_of(interval, False), **how))
        arena = Arena.create(layout)
        assert arena.resident_bytes() == 0
        for spec, _ in layout.places:
            arena.tensor(spec.name).zero_()
        assert arena.resident_bytes() == n * expected
        arena.close()
