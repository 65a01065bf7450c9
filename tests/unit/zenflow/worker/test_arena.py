"""The shared arena: arrays never overlap, processes share their memory, and only touched pages use
memory."""

import errno
import gc
import itertools
import os
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from deepspeed_ext.errors import UnsupportedError
from deepspeed_ext.runtime import memory as memory_module
from deepspeed_ext.runtime.memory import PageLocks
from deepspeed_ext.zenflow.plan.arrays import ArraySpec, plan_layout
from deepspeed_ext.zenflow.worker import arena as arena_module
from deepspeed_ext.zenflow.worker.arena import Arena
from tests.support.arenas import arena_of
from tests.support.resident import resident_bytes

PAGE, MIB = 4096, 1 << 20
numels = st.one_of(
    st.integers(0, 10_000),
    st.integers(MIB // 4, 3 * MIB),
    st.sampled_from([1 << k for k in range(27)]),
)
sizes = st.lists(
    st.tuples(st.sampled_from(["float32", "bfloat16", "float16"]), numels), min_size=1, max_size=20
)


@settings(deadline=None)
@given(sizes)
def test_places_are_aligned_and_on_pages_of_their_own(described: list[tuple[str, int]]) -> None:
    layout = plan_layout(
        [ArraySpec(str(i), dtype, numel) for i, (dtype, numel) in enumerate(described)]
    )
    end, free_page = 0, 0
    for spec, offset in layout.arrays:
        assert offset % (64 if spec.nbytes >= MIB else PAGE) == 0
        assert offset // PAGE >= free_page
        assert offset - end < (PAGE if spec.nbytes < MIB else 3 * MIB)
        end = offset + spec.nbytes
        free_page = -(-end // PAGE)
    assert end <= layout.nbytes <= end + PAGE


@given(
    numel=st.one_of(
        st.integers(MIB // 2, 1 << 40), st.sampled_from([1 << k for k in range(19, 40)])
    ),
    weights=st.sampled_from(["float32", "float16"]),
    ring=st.integers(1, 30),
    partitions=st.integers(1, 3),
)
@example(numel=1 << 22, weights="float32", ring=30, partitions=1)
def test_arrays_that_are_read_together_begin_apart(
    numel: int, weights: str, ring: int, partitions: int
) -> None:
    """Else the heads of equally long arrays of a power of two elements compete for cache sets and
    memory banks."""
    specs = [
        arena_of(numel, ring, partition=i, dtypes=(weights, "float32")) for i in range(partitions)
    ]
    places = plan_layout([spec for partition in specs for spec in partition]).by_key()
    for partition in specs:
        big = [places[spec.key].offset for spec in partition if spec.nbytes >= MIB]
        assert len({offset % PAGE for offset in big}) == len(big)
        pages = sorted(offset % MIB // PAGE for offset in big)
        around = itertools.pairwise([*pages, pages[0] + MIB // PAGE])
        assert all(after - before >= 3 for before, after in around)


def test_a_mapping_that_the_system_refuses_says_why() -> None:
    with pytest.raises(OSError, match="Bad file descriptor"):
        arena_module._map(-1, PAGE)


def test_two_mappings_share_memory_and_tensors_outlive_the_arena() -> None:
    layout = plan_layout(
        [
            ArraySpec("a", "float32", 5),
            ArraySpec("b", "bfloat16", 7000),
            ArraySpec("none", "float32", 0),
        ]
    )
    arena = Arena.create(layout)
    other = Arena(os.dup(arena.fileno), layout)
    ours, theirs = arena.tensor("b"), other.tensor("b")
    ours.copy_(torch.arange(7000) % 250)
    assert torch.equal(theirs, (torch.arange(7000) % 250).to(torch.bfloat16))
    assert arena.array("b").address == ours.data_ptr()
    assert arena.tensor("none").numel() == 0
    for each in (arena, arena, other):
        each.close()
    del arena, other
    assert ours[249] == 249


def test_host_bytes_per_parameter() -> None:
    """12 (p, m, v) + 2 per slot of the ring + 4/32 (block means), by the pages that are touched; y
    in fp16 has an array of its own beside gradients in fp32."""
    n = 1 << 20
    for dtypes, slots, expected in (
        (("bfloat16", "bfloat16"), 1, 14.125),
        (("float16", "float32"), 1, 18.125),
        (("bfloat16", "bfloat16"), 7, 26.125),
    ):
        layout = plan_layout(arena_of(n, slots, dtypes=dtypes))
        arena = Arena.create(layout)
        assert resident_bytes(arena) == 0
        for spec, _ in layout.arrays:
            arena.tensor(*spec.key).zero_()
        pages_begun = len(layout.arrays) * PAGE
        assert n * expected <= resident_bytes(arena) <= n * expected + pages_begun
        arena.close()


@pytest.mark.parametrize("summed", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("weights", ["float32", "bfloat16", "float16"])
def test_y_replaces_the_gradient_of_its_slot_if_their_items_have_one_size(
    weights: str, summed: str
) -> None:
    """Otherwise it has one array of its own, for every slot, which overlaps no gradient."""
    dtypes, gradient = (weights, summed), summed if weights == "float16" else weights
    layout = plan_layout(
        [*arena_of(100, 3, dtypes=dtypes), *arena_of(50, 3, partition=1, dtypes=dtypes)]
    )
    arena, pages = Arena.create(layout), layout.page_bytes()
    replaces = getattr(torch, weights).itemsize == getattr(torch, gradient).itemsize
    for index, slot in itertools.product(range(2), range(3)):
        y, g = arena.tensor("y", index, slot), arena.tensor("g", index, slot)
        assert (y.dtype, g.dtype, y.numel()) == (
            getattr(torch, weights),
            getattr(torch, gradient),
            g.numel(),
        )
        assert arena.array("y", index, slot) == (y.data_ptr(), weights, y.numel())
        assert (y.data_ptr() == g.data_ptr()) is replaces
        assert replaces or y.data_ptr() == arena.tensor("y", index).data_ptr()
    assert [key for key in pages if key.kind == "y"] == (
        [] if replaces else [("y", 0, 0), ("y", 1, 0)]
    )
    arena.close()


def test_discarded_memory_is_given_back_and_reads_as_zero() -> None:
    arena = Arena.create(plan_layout([ArraySpec("a", "float32", 1 << 16)]))
    tensor = arena.tensor("a").fill_(1.0)
    assert resident_bytes(arena) == 1 << 18
    arena.close()
    arena.discard()
    assert resident_bytes(arena) == 0
    assert not tensor.any()


@pytest.mark.parametrize("refused", ["memfd_create", "ftruncate", "mmap"])
def test_a_refused_arena_is_one_error_and_leaves_no_descriptor(
    refused: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trainer that goes on without ZenFlow would otherwise lose a descriptor, and memory, with
    each attempt."""

    def refuse(*args: object) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    before = os.listdir("/proc/self/fd")
    if refused == "mmap":
        monkeypatch.setattr(arena_module, "_map", refuse)
    else:
        monkeypatch.setattr(os, refused, refuse)
    with pytest.raises(UnsupportedError, match="Raise the limit on open files"):
        Arena.create(plan_layout([ArraySpec("a", "float32", 5)]))
    assert os.listdir("/proc/self/fd") == before


def test_no_descriptor_replaces_stdin() -> None:
    """In a job that was started with stdin closed, the next opened file gets descriptor 0."""
    stdin = os.dup(0)
    os.close(0)
    try:
        arena = Arena.create(plan_layout([ArraySpec("a", "float32", 5)]))
        assert arena.fileno > 2
        arena.close()
    finally:
        os.dup2(stdin, 0)
        os.close(stdin)


class LockingAccelerator:
    """Notes what it is asked to page-lock, and locks whole pages alone, as some accelerators do."""

    def __init__(self, events: list[str]) -> None:
        self.events = events
        self.locked: dict[int, int] = {}

    def is_synchronized_device(self) -> bool:
        return False

    def pin_memory_alignment(self) -> int:
        return PAGE

    def register_host_memory(self, address: int, nbytes: int) -> bool:
        self.events.append("lock")
        self.locked[address] = nbytes
        return True

    def unregister_host_memory(self, address: int) -> None:
        self.events.append("unlock")
        del self.locked[address]


@pytest.fixture
def accelerator(monkeypatch: pytest.MonkeyPatch) -> LockingAccelerator:
    """The accelerator of `PageLocks`; it notes too when an arena is unmapped."""
    events: list[str] = []
    unmap, accelerator = arena_module._unmap, LockingAccelerator(events)

    def noted_unmap(*args: Any) -> None:
        events.append("unmap")
        unmap(*args)

    monkeypatch.setattr(arena_module, "_unmap", noted_unmap)
    monkeypatch.setattr(memory_module, "_left", [])
    monkeypatch.setattr(memory_module, "get_accelerator", lambda: accelerator)
    return accelerator


def test_locked_pages_are_unlocked_before_they_are_unmapped(
    accelerator: LockingAccelerator,
) -> None:
    arena, locks = Arena.create(plan_layout([ArraySpec("a", "float32", 5000)])), PageLocks()
    for _ in range(2):
        locks.lock([torch.empty(0), arena.tensor("a")])
    del arena
    gc.collect()
    assert accelerator.events == ["lock"]
    locks.unlock()
    gc.collect()
    assert accelerator.events == ["lock", "unlock", "unmap"]


def test_memory_whose_copies_may_not_have_ended_stays_locked_and_mapped(
    accelerator: LockingAccelerator,
) -> None:
    for leaves in (True, False):  # or nobody calls anything
        arena, locks = Arena.create(plan_layout([ArraySpec("a", "float32", 5000)])), PageLocks()
        locks.lock([arena.tensor("a")])
        if leaves:
            locks.leave()
            locks.unlock()
        del arena, locks
        gc.collect()
    assert accelerator.events == ["lock", "lock"]


def test_whole_pages_are_locked_where_the_accelerator_wants_them(
    accelerator: LockingAccelerator,
) -> None:
    layout = plan_layout([ArraySpec("a", "float32", MIB), ArraySpec("b", "float32", MIB)])
    arena, locks = Arena.create(layout), PageLocks()
    tensors = [arena.tensor("a"), arena.tensor("b")]
    assert tensors[1].data_ptr() % PAGE
    locks.lock(tensors)
    assert all(begin % PAGE == 0 for begin in accelerator.locked)
    ends = [begin + nbytes for begin, nbytes in accelerator.locked.items()]
    assert ends == [tensor.data_ptr() + tensor.nbytes for tensor in tensors]
    locks.unlock()
    assert not accelerator.locked


def test_an_accelerator_that_cannot_lock_pages_says_so(
    accelerator: LockingAccelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    warnings: list[str] = []
    monkeypatch.setattr(memory_module, "warn_once", warnings.append)
    monkeypatch.setattr(memory_module, "can_register_host_memory", lambda: False)
    monkeypatch.setattr(LockingAccelerator, "device_name", lambda self: "other", raising=False)
    monkeypatch.setattr(accelerator, "register_host_memory", lambda address, nbytes: False)
    locks = PageLocks()
    locks.lock([torch.zeros(5000)])
    locks.unlock()
    assert accelerator.events == []
    (warning,) = warnings
    assert "20,000 bytes" in warning
    assert "'other' has no register_host_memory" in warning


@settings(deadline=None, max_examples=30)
@given(before=st.integers(0, 40_000), numel=st.integers(0, 40_000), others=st.integers(0, 5_000))
def test_elements_before_an_array_are_of_one_piece_with_it_and_take_memory_only_while_written(
    before: int, numel: int, others: int
) -> None:
    specs = [ArraySpec("a", "bfloat16", others), ArraySpec("p", "float32", numel, before=before)]
    specs.append(ArraySpec("b", "float32", others))
    arena = Arena.create(plan_layout(specs))
    for kind in ("a", "p", "b"):
        arena.tensor(kind).fill_(3.0)
    used = resident_bytes(arena)
    arena.whole("p")[:before] = 5.0
    assert arena.whole("p").tolist() == [5.0] * before + [3.0] * numel
    arena.release_before("p")
    left = arena.whole("p")[:before]
    assert resident_bytes(arena) <= used + 2 * PAGE  # pages that it shares with its neighbours stay
    assert int((left != 0).sum()) <= 2 * PAGE // 4
    assert arena.tensor("p").tolist() == [3.0] * numel
    arena.release("p")
    assert not any(arena.tensor("p").tolist())
    assert all(arena.tensor(kind).tolist() == [3.0] * others for kind in ("a", "b"))
