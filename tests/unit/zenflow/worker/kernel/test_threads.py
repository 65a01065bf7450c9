"""The kernel's own threads: they stay, run where they are told to, and are not missed if there are
none."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from deepspeed_ext.zenflow.worker.kernel.adam_pass import AdamStep, Publish
from tests.support.kernels import LIBRARY, make_kernel, make_pass, needs_native
from tests.support.paths import ROOT

pytestmark = needs_native
CPUS = sorted(os.sched_getaffinity(0))
COUNTS = (1, 2, 3, 5, 8, 13, 64)
"""Of threads: below and above the cores of any machine that runs the tests, and above the tiles of
a small pass."""
OTHER_USER = 61234
"""Nobody else's, so that its limit on threads counts those of one process."""
PRELUDE = """
import array, ctypes, hashlib, mmap, os, random, resource, signal, sys, threading
from deepspeed_ext.zenflow.worker.kernel.adam_pass import AdamStep, Publish
from deepspeed_ext.zenflow.worker.kernel.passes import Array, Pass
from deepspeed_ext.zenflow.worker.kernel.native import NativeKernel
from deepspeed_ext.zenflow.worker.kernel.adam_pass import ADAM_STATE

signal.alarm(30)
kernel = NativeKernel(sys.argv[1], threads=3)

def touches_all(pages=64, page=4096):
    descriptor = os.memfd_create("touched")
    os.ftruncate(descriptor, pages * page)
    memory = mmap.mmap(descriptor, pages * page)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    kernel.touch(Array(address, "uint8", pages * page), 1, 1)
    return os.fstat(descriptor).st_blocks * 512 == pages * page

def threads():
    return len(os.listdir("/proc/self/task"))

def filled(n, seed, factor):
    draw = random.Random(seed)
    return array.array("f", (factor * draw.random() for _ in range(n)))

def at(values, dtype="float32"):
    return Array(values.buffer_info()[0], dtype, len(values))

def bits(count, numel, block, passes=1):
    kernel = NativeKernel(sys.argv[1], threads=count)
    factors = enumerate((0.1, 1e-3, 1e-4, 1e-2))
    p, m, v, grad = (filled(numel, seed, factor) for seed, factor in factors)
    published, means = filled(numel, 9, 0.0), filled(-(-numel // block), 9, 0.0)
    step = AdamStep(1e-3, 0.9, 0.95, 1e-8, 0.1, False, 7, 0.5)
    publish = Publish(0.99, 1e-3, 1e-5, 2e-4, step.bias_correction2_sqrt, 1e-8)
    state = at(p), at(m), at(v)
    adam = Pass(ADAM_STATE, state, at(published), block, at(grad), at(means))
    for _ in range(passes):
        kernel.run(adam, publish, step)
    return hashlib.sha256(b"".join(map(bytes, (p, m, v, published, means)))).hexdigest()

def meanwhile(action):
    end = threading.Event()
    def repeat():
        while not end.is_set():
            action()
    thread = threading.Thread(target=repeat)
    thread.start()
    return lambda: (end.set(), thread.join())

def limit_threads(more):  # returns how many more than now may run; root has no such limit
    if os.getuid() == 0:
        os.setgroups([])
        os.setresuid(OTHER_USER, OTHER_USER, OTHER_USER)
    else:
        more = 0
    most = resource.getrlimit(resource.RLIMIT_NPROC)[1]
    resource.setrlimit(resource.RLIMIT_NPROC, (threads() + more if more else 1, most))
    return more
""".replace("OTHER_USER", str(OTHER_USER))


def run(code: str) -> list[str]:
    """What `code` prints in a process without torch."""
    command = [sys.executable, "-c", PRELUDE + code, str(LIBRARY)]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_threads_start_with_the_first_pass_and_stay() -> None:
    assert run("print(threads(), touches_all(), threads(), touches_all(), threads())") == [
        "1",
        "True",
        "3",
        "True",
        "3",
    ]


def test_a_forked_child_has_threads_of_its_own() -> None:
    code = """
touches_all()
if (child := os.fork()) == 0:
    signal.alarm(20)
    os._exit(0 if threads() == 1 and touches_all() and threads() == 3 else 1)
print(os.waitpid(child, 0)[1], touches_all())
"""
    assert run(code) == ["0", "True"]


def test_where_no_thread_can_start_the_caller_does_all_the_work() -> None:
    code = """
size = int(open("/proc/self/statm").read().split()[0]) * 4096
resource.setrlimit(resource.RLIMIT_AS, (size + (2 << 20), -1))  # less than a stack
print(touches_all(), threads())
resource.setrlimit(resource.RLIMIT_AS, (-1, -1))
print(touches_all(), threads())
"""
    assert run(code) == ["True", "1", "True", "3"]


def test_under_a_limit_on_threads_those_that_run_do_all_the_work() -> None:
    """Before, during and after: none may start, two may, and the caller takes what the others would
    have done."""
    code = """
alone = bits(1, 5003, 32)
for more in (0, 2):
    if (child := os.fork()) == 0:
        more = limit_threads(more)
        is_same = [bits(count, 5003, 32) for count in (3, 8, 64)] == 3 * [alone]
        os._exit(0 if is_same and threads() == 1 + more else 1)
    print(os.waitpid(child, 0)[1])
"""
    assert run(code) == ["0", "0"]


@pytest.mark.skipif(len(CPUS) < 2, reason="needs two CPUs")
def test_where_a_thread_is_missing_the_caller_stays_on_its_own_cpu() -> None:
    code = f"""
limit_threads(0)
kernel.pin({[CPUS[0], CPUS[1], CPUS[1]]})
print(threads(), *os.sched_getaffinity(0))
"""
    assert run(code) == ["1", str(CPUS[0])]


def test_every_number_of_threads_gives_the_same_bits() -> None:
    """Blocks that fill no tile, and more threads than tiles, also where fewer follow more."""
    code = f"""
for numel, block in ((5003, 32), (5003, 300), (257, 256), (70, 1), (1, 1)):
    print(len({{bits(count, numel, block) for count in (*{COUNTS}, 2, 1)}}))
print(threads())
"""
    assert run(code) == [*["1"] * 5, str(max(COUNTS))]


def test_a_fork_in_the_middle_of_a_pass_leaves_both_their_threads() -> None:
    """The child has none of the parent's threads, and a lock that another of them holds is not the
    child's."""
    code = """
alone, ended = bits(1, 5003, 32), []
stop = meanwhile(lambda: bits(3, 5003, 32))
for _ in range(8):
    if (child := os.fork()) == 0:
        signal.alarm(20)
        os._exit(0 if bits(3, 5003, 32) == alone else 1)
    ended.append(os.waitpid(child, 0)[1])
stop()
print(sum(ended), bits(3, 5003, 32) == alone)
"""
    assert run(code) == ["0", "True"]


@pytest.mark.skipif(len(CPUS) < 2, reason="needs two CPUs")
def test_each_thread_is_pinned_to_its_cpu() -> None:
    cpus = [CPUS[1], CPUS[0], CPUS[1]]
    code = f"""
kernel.pin({cpus})
tasks = sorted(os.listdir("/proc/self/task"), key=int)
print(*(next(iter(os.sched_getaffinity(int(task)))) for task in tasks))
print(sum(len(os.sched_getaffinity(int(task))) for task in os.listdir("/proc/self/task")))
"""
    assert run(code) == [*map(str, cpus), "3"]


def test_passes_of_several_callers_do_not_mix() -> None:
    """Each has its own arrays and its own number of threads."""

    def passes(caller: int) -> torch.Tensor:
        p, m, v, gradient, y = (torch.full((4096,), 0.1 * (caller + k)) for k in range(5))
        tensors = {"p": p, "m": m, "v": v, "y": y, "block_means": torch.zeros(4096 // 32)}
        step = AdamStep(1e-3, 0.9, 0.95, 1e-8, 0.1, True, 1, 1.0)
        publish = Publish.exact(step.bias_correction2_sqrt, step.eps)
        work = make_pass(tensors, 32, gradient)
        kernel = make_kernel("native", threads=1 + caller)
        for _ in range(50):
            kernel.run(work, publish, step)
        assert tensors, "the pass holds addresses in them"
        return p

    alone = [passes(caller) for caller in range(4)]
    with ThreadPoolExecutor(4) as callers:
        together = list(callers.map(passes, range(4)))
    assert all(map(torch.equal, alone, together))
