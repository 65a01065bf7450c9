"""The thread that first touches a page is the one that passes over it, so that its memory is
near."""

from __future__ import annotations

import ctypes
import mmap
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspeed_ext.cores.plan import PlanRequest, RankFacts, plan_host
from deepspeed_ext.cores.threads import WorkerPlacement
from deepspeed_ext.cores.topology import Core, Topology
from deepspeed_ext.zenflow.plan.arrays import ArenaKinds, ArrayKey, Dtypes, plan_layout
from deepspeed_ext.zenflow.worker.arena import Arena
from deepspeed_ext.zenflow.worker.kernel.adam_pass import ADAM_STATE
from deepspeed_ext.zenflow.worker.kernel.native import NativeKernel
from deepspeed_ext.zenflow.worker.main import block_bytes
from tests.support.kernels import LIBRARY, needs_native

PAGE = 4096


def touchers_of(kernel: NativeKernel, start: int, nbytes: int, **how: Any) -> list[int]:
    """The thread that touches each page of an array that begins `start` bytes behind a page."""
    pages = -(-(start + nbytes) // PAGE)
    memory = mmap.mmap(-1, pages * PAGE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory)) + start
    found = (ctypes.c_int32 * pages)()
    kernel.first_touch(address, nbytes, touchers=found, **how)
    return list(found)


@needs_native
@settings(deadline=None)
@given(st.data())
def test_pages_are_touched_by_the_thread_that_passes_over_them(data: st.DataObject) -> None:
    """For every array of a partition: of elements of 1, 2 or 4 bytes, or some bytes for each
    block."""
    threads = data.draw(st.integers(1, 9))
    block_size = data.draw(st.sampled_from([1, 8, 32, 48, 100, 256, 1000]))
    blocks = data.draw(st.integers(1, max(1, 60_000 // block_size)))
    numel = max(1, blocks * block_size - data.draw(st.integers(0, block_size - 1)))
    chunk = data.draw(st.one_of(st.none(), st.integers(1, blocks)))
    start = data.draw(st.sampled_from([0, 64, 3 * PAGE // 4, PAGE - 4]))
    per_element = data.draw(st.sampled_from([1, 2, 4, None]))
    per_block = (
        data.draw(st.sampled_from([1, 4, 8, 512]))
        if per_element is None
        else block_size * per_element
    )
    kernel = NativeKernel(LIBRARY, threads)
    expected: list[int] = []
    for begin in range(0, numel, (chunk or blocks) * block_size):
        expected += kernel.passers(min((chunk or blocks) * block_size, numel - begin), block_size)
    nbytes = blocks * per_block if per_element is None else numel * per_element
    how = {"block_bytes": per_block, "block_size": block_size, "blocks_per_chunk": chunk}
    for page, thread in enumerate(touchers_of(kernel, start, nbytes, **how)):
        begins = max(0, page * PAGE - start)  # of the page, in the array
        passed = begins // per_element if per_element else begins // per_block * block_size
        assert thread == expected[passed]


@needs_native
def test_without_chunks_each_thread_would_have_the_memory_of_others() -> None:
    """What the division by chunks is for: the first chunk of an array belongs to all threads."""
    kernel, numel, chunk = NativeKernel(LIBRARY, 4), 1 << 16, 1 << 14
    how = {"block_bytes": 128, "block_size": 32}
    pages = chunk * 4 // PAGE
    whole = touchers_of(kernel, 0, 4 * numel, **how)
    by_chunk = touchers_of(kernel, 0, 4 * numel, blocks_per_chunk=chunk // 32, **how)
    assert len(set(whole[:pages])) == 1
    assert [len(set(by_chunk[first : first + pages])) for first in range(0, len(whole), pages)] == [
        4
    ] * 4


@pytest.mark.parametrize("numel", [1, 31, 32, 1000, 4096])
def test_bytes_of_a_block_are_those_of_each_array(numel: int) -> None:
    dtypes = Dtypes("bfloat16", "float32", "float32", "bfloat16")
    layout = replace(ADAM_STATE, moment_dtype="int8", with_signs=True)
    kinds = ArenaKinds(layout, 32, dtypes, per_block=True, lifts_y=True, slots=1)
    specs = [spec for spec in kinds.of(0, numel) if not spec.kind.endswith("shown")]
    arena = Arena.create(plan_layout(specs))
    found = {spec.kind: block_bytes(arena, ArrayKey(spec.kind, 0), 32) for spec in specs}
    assert found == {
        "p": 128,
        "m": 32,
        "v": 32,
        "m_scales": 1,
        "v_scales": 1,
        "y": 64,
        "known": 8,
        "g": 128,
    }
    arena.close()


def host_of(nodes: int, cores: int) -> Topology:
    found = [
        Core(node * cores + i, (node * cores + i,), node)
        for node in range(nodes)
        for i in range(cores)
    ]
    return Topology(tuple(found), tuple(range(nodes)))


def placement_of(nodes: int, cores: int) -> WorkerPlacement:
    topology = host_of(nodes, cores)
    plan = plan_host(
        topology, [RankFacts(0, frozenset(topology.cpus), 0)], PlanRequest(pt_reserved_cores=2)
    )
    return WorkerPlacement.of(plan.ranks[0])


def test_threads_of_a_worker_on_several_nodes_stay() -> None:
    one, several = placement_of(1, 8), placement_of(2, 4)
    assert (one.pin_each_thread, several.pin_each_thread) == (False, True)


@needs_native
@settings(max_examples=40, deadline=None)
@given(
    nodes=st.integers(1, 4),
    cores=st.integers(1, 6),
    siblings=st.sampled_from(["none", "adjacent", "far"]),
    chunk=st.sampled_from([1 << 13, 1 << 14, 3 << 13]),
)
def test_each_node_has_the_memory_of_its_threads(
    nodes: int,
    cores: int,
    siblings: str,
    chunk: int,
) -> None:
    """On hosts from a table: one thread to a core, and of every chunk each node has as many pages
    as its threads pass over."""
    number = nodes * cores
    pus = {
        "none": lambda core: (core,),
        "adjacent": lambda core: (2 * core, 2 * core + 1),
        "far": lambda core: (core, core + number),
    }[siblings]
    table = [Core(core, pus(core), core // cores) for core in range(number)]
    topology = Topology(tuple(table), tuple(range(nodes)))
    facts = RankFacts(0, frozenset(topology.cpus), 0)
    plan = plan_host(topology, [facts], PlanRequest(pt_reserved_cores=1))
    placement = WorkerPlacement.of(plan.ranks[0])
    of_worker = [topology.core_of[cpu] for cpu in sorted(placement.cpus)]
    assert len(set(of_worker)) == len(of_worker), "two threads of the worker share a core"
    assert placement.pin_each_thread == (len({core.node for core in of_worker}) > 1)

    kernel = NativeKernel(LIBRARY, placement.threads)
    ids = (ctypes.c_int32 * placement.threads)()
    kernel._library.dsext_thread_ids(ids, placement.threads)  # in the order in which `pin` binds
    node_of = {number: core.node for number, core in zip(ids, of_worker, strict=True)}
    how = {"block_bytes": 128, "block_size": 32, "blocks_per_chunk": chunk // 32}
    found = [node_of[each] for each in touchers_of(kernel, 0, 4 * 3 * chunk, **how)]
    pages = 4 * chunk // PAGE
    for begin in range(0, len(found), pages):
        for node in {core.node for core in of_worker}:
            threads = sum(core.node == node for core in of_worker)
            share = found[begin : begin + pages].count(node) / pages
            assert abs(share - threads / len(of_worker)) <= (threads + 1) / pages
