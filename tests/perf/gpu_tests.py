"""The parts of `make test-gpu`: every test marked `gpu` is in one of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tests.perf import gpu_time
from tests.perf.part import Part, operators

__all__ = ["GROUPS", "part_of", "parts"]

COLLECTIVES, ACCELERATOR = "tests/unit/runtime/test_all_collectives.py", "tests/unit/adapter/test_accelerator.py"
COPIES, OFFLOAD_STATES = "tests/unit/zenflow/transfers/test_copies.py", "tests/unit/zenflow/test_offload_states.py"
FLATTEN = "tests/unit/flatten/test_gpu.py"
KERNELS = ("tests/unit/zenflow/kernels/test_gpu.py", "tests/unit/zenflow/kernels/test_alignment.py")


@dataclass(frozen=True)
class Group:
    """Tests that run in one process of pytest.

    Attributes:
        files: where they are; none: all others.
        ranks: of the tests with a setting of that name, those with this value; None: all.
        simulated_seconds: half of what they took on the simulated device, where they had a third of a core; of the
            copies, 60 more for 64 million parameters instead of one. Docs: docs/lab/archive/gpu.md.
        pools: sets of ranks that they start.
    """

    name: str
    covers: str
    files: tuple[str, ...]
    simulated_seconds: float
    pools: int
    ranks: int | None = None


GLOO = "two ranks that share a device, through gloo: nothing of NCCL, unless there are two devices"
GROUPS = (
    Group("collectives", "every collective of the package, one rank, NCCL", (COLLECTIVES,), 8, 1),
    Group("kernels", "device kernels equal torch operations, and are prepared at the start", KERNELS, 15, 2),
    Group("moments", "moments in bf16 and of 8 bits", ("tests/unit/zenflow/test_state_dtype.py",), 25, 1),
    Group("lion", "Lion", ("tests/unit/zenflow/test_lion.py",), 20, 2),
    Group("weights-on-host", "offload_param", ("tests/unit/zenflow/test_offload_param.py",), 25, 2),
    Group("gradients-on-host", "gradients_on_host", ("tests/unit/adapter/test_host_gradients.py",), 10, 1),
    Group("others", "whatever no other part has", (), 15, 2),
    Group("copies", "every copy of ZenFlow waits for its source, one rank", (COPIES,), 28 + 60, 1),
    Group("training", "gather, ZenFlow and resume on one rank, NCCL", (ACCELERATOR,), 70, 1, ranks=1),
    Group("offload-states", "device memory is free while states are away", (OFFLOAD_STATES,), 10, 2),
    Group("flatten", f"tiers of flattening, {GLOO}", (FLATTEN,), 10, 1),
    Group("training-2", f"gather, ZenFlow and resume, {GLOO}", (ACCELERATOR,), 92, 1, ranks=2),
)
"""In the order in which they run: what only a GPU can show comes first."""


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
    found = [operators("tests/operators")]
    for group in GROUPS:
        name, usual = f"tests/{group.name}", gpu_time.tests(group.simulated_seconds, group.pools)
        arguments = ("-m", "gpu", "--part", name, *group.files)
        found.append(Part(name, "pytest", arguments, arguments, 2 * usual + 30, usual=usual, covers=group.covers))
    return found
