"""The kernel's own threads: they stay, run where they are told to, and are not missed if there are none."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from deepspeed_ext.zenflow.kernel import AdamPass, AdamStep, Publish
from tests.support.kernels import LIBRARY, array, make_kernel, needs_native
from tests.support.paths import ROOT

pytestmark = needs_native
CPUS = sorted(os.sched_getaffinity(0))
PRELUDE = """
import ctypes, mmap, os, resource, signal, sys
from deepspeed_ext.zenflow.kernel import NativeKernel

signal.alarm(30)
kernel = NativeKernel(sys.argv[1], threads=3)

def touches_all(pages=64, page=4096):
    descriptor = os.memfd_create("touched")
    os.ftruncate(descriptor, pages * page)
    memory = mmap.mmap(descriptor, pages * page)
    kernel.first_touch(ctypes.addressof(ctypes.c_char.from_buffer(memory)), pages * page)
    return os.fstat(descriptor).st_blocks * 512 == pages * page

def threads():
    return len(os.listdir("/proc/self/task"))
"""


def run(code: str) -> list[str]:
    """What `code` prints in a process without torch."""
    command = [sys.executable, "-c", PRELUDE + code, str(LIBRARY)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
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


@pytest.mark.skipif(len(CPUS) < 2, reason="needs two CPUs")
def test_each_thread_is_pinned_to_its_cpu() -> None:
    cpus = [CPUS[1], CPUS[0], CPUS[1]]
    code = f"""
kernel.pin({cpus})
print(*(next(iter(os.sched_getaffinity(int(task)))) for task in sorted(os.listdir("/proc/self/task"), key=int)))
print(sum(len(os.sched_getaffinity(int(task))) for task in os.listdir("/proc/self/task")))
"""
    assert run(code) == [*map(str, cpus), "3"]


def test_passes_of_several_callers_do_not_mix() -> None:
    """Each has its own arrays and its own number of threads."""

    def passes(caller: int) -> torch.Tensor:
        p, *others = (torch.full((4096,), 0.1 * (caller + k)) for k in range(5))
        others.append(torch.zeros(4096 // 32))
        m, v, gradient, published, means = map(array, others)
        step = AdamStep(1e-3, 0.9, 0.95, 1e-8, 0.1, True, 1, 1.0)
        publish = Publish.exact(step.bias_correction2_sqrt, step.eps)
        work = AdamPass(array(p), m, v, (gradient,), (step,), published, means, 32, publish)
        kernel = make_kernel("native", threads=1 + caller)
        for _ in range(50):
            kernel.run(work)
        assert others, "the pass holds addresses in them"
        return p

    alone = [passes(caller) for caller in range(4)]
    with ThreadPoolExecutor(4) as callers:
        together = list(callers.map(passes, range(4)))
    assert all(map(torch.equal, alone, together))
