"""The parts of `make test-gpu`: every test marked `gpu` is in one of them.

First comes what no GPU has shown: NCCL between ranks, and the tests that failed there once and were
mended.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

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
        seconds: what they take on an H200 with 16 cores, ten parts beside each other, rounded up:
            measured, but for the gather (a guess), a third of the trainings, and for what
            has become shorter since. Docs: docs/results/gpu.md.
        ranks: of the tests with a setting of that name, those with this value; None: all.
        stages: the same of the setting `stage`; 0: those without it, of the gather.
    """

    name: str
    covers: str
    files: tuple[str, ...]
    seconds: float
    ranks: int | None = None
    stages: tuple[int, ...] | None = None


SHARED = "ranks that may share the device, through NCCL if that works there"


def _trainings(
    name: str, ranks: int, of_ranks: str, stages_1_2: float, stage_3: float
) -> tuple[Group, Group]:
    """The same tests of two halves of the stages, each with its seconds."""
    covers, files = f"ZenFlow and resume, {of_ranks}", (ACCELERATOR,)
    return (
        Group(f"{name}/stages-1-2", covers, files, stages_1_2, ranks, (1, 2)),
        Group(f"{name}/stage-3", covers, files, stage_3, ranks, (3,)),
    )


GROUPS = (
    Group(
        "collectives", f"every collective of the package, 1, 2 and 3 {SHARED}", (COLLECTIVES,), 55
    ),
    Group(
        "weights-on-host",
        f"offload_param, 2 {SHARED}",
        ("tests/unit/zenflow/test_offload_param.py",),
        180,
    ),
    Group("rank-death", f"a rank dies, 2 and 3 {SHARED}", (DEATH,), 110),
    Group("copies", "every copy of ZenFlow waits for its source, one rank", (COPIES,), 190),
    Group(
        "gather",
        f"the gather equals DeepSpeed's, 1, 2 and 3 {SHARED}",
        (ACCELERATOR,),
        60,
        None,
        (0,),
    ),
    *_trainings("training-3", 3, f"3 {SHARED}", 270, 260),
    *_trainings("training-2", 2, f"2 {SHARED}", 220, 210),
    *_trainings("training", 1, "one rank, NCCL", 150, 150),
    Group("flatten", f"tiers of flattening, 2 {SHARED}", (FLATTEN,), 105),
    Group(
        "model-parallel",
        f"replicated parameters of 2 tensor-parallel {SHARED}",
        (TENSOR_PARALLEL,),
        90,
    ),
    Group("experts", f"expert groups, 2 {SHARED}", (EXPERTS,), 120),
    Group(
        "offload-states",
        f"device memory while states are away, 2 {SHARED}",
        (OFFLOAD_STATES,),
        100,
    ),
    Group("others", "whatever no other part has", (), 90),
    Group(
        "kernels",
        "device kernels equal torch operations, and are prepared at the start",
        KERNELS,
        125,
    ),
    Group("lion", "Lion", ("tests/unit/zenflow/test_lion.py",), 130),
    Group(
        "moments", "moments in bf16 and of 8 bits", ("tests/unit/zenflow/test_state_dtype.py",), 95
    ),
    Group(
        "gradients-on-host",
        "gradients_on_host",
        ("tests/unit/adapter/test_gradients_on_host.py",),
        20,
    ),
)
"""In the order in which they run."""


def part_of(path: str, settings: dict[str, Any]) -> str:
    """The name of the part that a test belongs to.

    Args:
        path: its file, relative to the repository.
        settings: its parameters.
    """
    ranks, stage = settings.get("ranks", 1), settings.get("stage", 0)
    fitting = [
        group
        for group in GROUPS
        if path in group.files
        and group.ranks in (None, ranks)
        and (group.stages is None or stage in group.stages)
    ]
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
        usual=20,
        covers="does NCCL run with 2 and 3 ranks on one device? otherwise they talk through gloo",
        timed=False,
    )
    found = [probe, operators("tests/operators")]
    for group in GROUPS:
        name = f"tests/{group.name}"
        arguments = ("-m", "gpu", "--part", name, *group.files)
        limits = {"limit": 2 * group.seconds + 30, "usual": group.seconds}
        found.append(
            Part(name, "pytest", arguments, arguments, covers=group.covers, timed=False, **limits)
        )
    return found
