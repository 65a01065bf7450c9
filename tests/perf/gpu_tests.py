"""The parts of `make test-gpu`: every test marked `gpu` is in one of them.

First comes what no GPU has shown: NCCL between ranks, and the tests that failed there once and were
mended.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tests.perf import gpu_time
from tests.perf.part import Part, operators

__all__ = ["GROUPS", "part_of", "parts"]

COLLECTIVES = "tests/unit/runtime/test_all_collectives.py"
ACCELERATOR = "tests/unit/adapter/test_accelerator.py"
DEATH, EXPERTS = "tests/unit/faults/test_rank_death.py", "tests/unit/zenflow/test_experts.py"
TENSOR_PARALLEL = "tests/unit/zenflow/test_model_parallel.py"
COPIES = "tests/unit/zenflow/transfers/test_copies.py"
OFFLOAD_STATES = "tests/unit/zenflow/test_offload_states.py"
FLATTEN = "tests/unit/flatten/test_gpu.py"
KERNELS = ("tests/unit/zenflow/kernels/test_gpu.py", "tests/unit/zenflow/kernels/test_alignment.py")


@dataclass(frozen=True)
class Group:
    """Tests that run in one process of pytest.

    Attributes:
        files: where they are; none: all others.
        ranks: of the tests with a setting of that name, those with this value; None: all.
        simulated_seconds: half of what they took on the simulated device, where they had a third of
            a core; of the copies, 60 more for 64 million parameters instead of one. Docs:
                docs/lab/archive/gpu.md.
        pools: sets of ranks that they start.
    """

    name: str
    covers: str
    files: tuple[str, ...]
    simulated_seconds: float
    pools: int
    ranks: int | None = None


SHARED = "ranks that may share the device, through NCCL if that works there"
GROUPS = (
    Group(
        "collectives",
        f"every collective of the package, 1, 2 and 3 {SHARED}",
        (COLLECTIVES,),
        25,
        3,
    ),
    Group(
        "weights-on-host",
        f"offload_param, 2 {SHARED}",
        ("tests/unit/zenflow/test_offload_param.py",),
        25,
        2,
    ),
    Group("rank-death", f"a rank dies, 2 and 3 {SHARED}", (DEATH,), 60, 2),
    Group("flatten", f"tiers of flattening, 2 {SHARED}", (FLATTEN,), 10, 1),
    Group("training-2", f"gather, ZenFlow and resume, 2 {SHARED}", (ACCELERATOR,), 92, 1, ranks=2),
    Group("training-3", f"gather, ZenFlow and resume, 3 {SHARED}", (ACCELERATOR,), 130, 1, ranks=3),
    Group(
        "model-parallel",
        f"replicated parameters of 2 tensor-parallel {SHARED}",
        (TENSOR_PARALLEL,),
        25,
        1,
    ),
    Group("experts", f"expert groups, 2 {SHARED}", (EXPERTS,), 20, 1),
    Group(
        "offload-states",
        f"device memory while states are away, 2 {SHARED}",
        (OFFLOAD_STATES,),
        10,
        2,
    ),
    Group("others", "whatever no other part has", (), 15, 2),
    Group(
        "kernels",
        "device kernels equal torch operations, and are prepared at the start",
        KERNELS,
        15,
        2,
    ),
    Group("copies", "every copy of ZenFlow waits for its source, one rank", (COPIES,), 28 + 60, 1),
    Group(
        "training", "gather, ZenFlow and resume on one rank, NCCL", (ACCELERATOR,), 70, 1, ranks=1
    ),
    Group(
        "moments",
        "moments in bf16 and of 8 bits",
        ("tests/unit/zenflow/test_state_dtype.py",),
        25,
        1,
    ),
    Group("lion", "Lion", ("tests/unit/zenflow/test_lion.py",), 20, 2),
    Group(
        "gradients-on-host",
        "gradients_on_host",
        ("tests/unit/adapter/test_gradients_on_host.py",),
        10,
        1,
    ),
)
"""In the order in which they run."""


def part_of(path: str, settings: dict[str, Any]) -> str:
    """The name of the part that a test belongs to.

    Args:
        path: its file, relative to the repository.
        settings: its parameters.
    """
    ranks = settings.get("ranks", 1)
    fitting = [group for group in GROUPS if path in group.files and group.ranks in (None, ranks)]
    fitting += [group for group in GROUPS if not group.files]
    return f"tests/{fitting[0].name}"


def parts() -> list[Part]:
    """All of them."""
    probe = Part(
        "tests/nccl",
        "tests.support.shared_device",
        (),
        (),
        120,
        usual=30,
        covers="does NCCL run with 2 and 3 ranks on one device? otherwise they talk through gloo",
        timed=False,
    )
    found = [probe, operators("tests/operators")]
    for group in GROUPS:
        name, usual = f"tests/{group.name}", gpu_time.tests(group.simulated_seconds, group.pools)
        arguments = ("-m", "gpu", "--part", name, *group.files)
        limits = {"limit": 2 * usual + 30, "usual": usual}
        found.append(
            Part(name, "pytest", arguments, arguments, covers=group.covers, timed=False, **limits)
        )
    return found
