"""Hosts on which core plans are known: what real machines look like, and what was asked of the
planner there."""

from __future__ import annotations

from dataclasses import dataclass, field

from deepspeed_ext.cores.host import Core
from deepspeed_ext.runtime.proc import parse_cpulist


@dataclass(frozen=True)
class Case:
    """A host, its ranks, and the plan that they should get; CPU sets as lists."""

    name: str
    cores: tuple[Core, ...]
    masks: tuple[str, ...]
    expected: tuple[tuple[str, str], ...]
    gpu_nodes: tuple[int, ...] | None = None
    nodes: tuple[int, ...] | None = None
    flags: tuple[str, ...] = ()
    idle: str = ""
    homes: tuple[int, ...] | None = None
    threads: tuple[int, ...] | None = None
    quota: str | None = None
    options: dict[str, float] = field(default_factory=dict)
    on_cpu: bool = True
    unbound: tuple[int, ...] = ()


def cores(
    number: int, sibling_step: int = 0, per_node: int = 0, first_node: int = 0, node_step: int = 1
) -> list[Core]:
    """``number`` cores i with siblings i, i + sibling_step; a node for every ``per_node`` of
    them."""
    made = []
    for i in range(number):
        place = i // per_node if per_node else 0
        pus = (i, i + sibling_step) if sibling_step else (i,)
        made.append(Core(i, pus, first_node + node_step * place))
    return made


def adjacent(
    number: int, threads: int, first: int = 0, node: int = 0, speed: int = 0
) -> list[Core]:
    """``number`` cores whose ``threads`` hardware threads have neighbouring numbers."""
    starts = range(first, first + number * threads, threads)
    return [Core(start, tuple(range(start, start + threads)), node, speed) for start in starts]


HYBRID = tuple(adjacent(6, 2, speed=1) + adjacent(8, 1, first=12))
ARM = tuple(adjacent(4, 1, speed=718) + adjacent(4, 1, first=4, speed=1024))
EVEN_ODD = tuple(Core(i, (i,), i % 2) for i in range(32))
ALL_64_SMT = "0-127"
SPARSE = "0,4-11,21-26,30-46"

CASES = (
    Case(
        "T1 sparse",
        tuple(cores(48)),
        (SPARSE,) * 2,
        (("0,4-10", "11,21-26,30"), ("31-38", "39-46")),
    ),
    Case(
        "T2 two sockets",
        tuple(cores(64, 64, 32)),
        (ALL_64_SMT,) * 4,
        (
            ("0-7,64-71", "8-15"),
            ("16-23,80-87", "24-31"),
            ("32-39,96-103", "40-47"),
            ("48-55,112-119", "56-63"),
        ),
        gpu_nodes=(0, 0, 1, 1),
        homes=(0, 0, 1, 1),
        threads=(8, 8, 8, 8),
    ),
    Case(
        "T3 adjacent siblings",
        tuple(adjacent(8, 2)),
        ("0-15",) * 2,
        (("0-3", "4,6"), ("8-11", "12,14")),
    ),
    Case(
        "T4 even and odd nodes",
        EVEN_ODD,
        ("0-31",) * 2,
        (
            ("1,3,5,7,9,11,13,15", "17,19,21,23,25,27,29,31"),
            ("0,2,4,6,8,10,12,14", "16,18,20,22,24,26,28,30"),
        ),
        gpu_nodes=(1, 0),
        homes=(1, 0),
    ),
    Case(
        "T6 second siblings",
        tuple(cores(64, 64)),
        ("64-127",) * 2,
        (("64-79", "80-95"), ("96-111", "112-127")),
    ),
    Case(
        "T7 bound with siblings",
        tuple(cores(16, 16, 8)),
        ("0-7,16-23", "8-15,24-31"),
        (("0-3,16-19", "4-7"), ("8-11,24-27", "12-15")),
        homes=(0, 1),
    ),
    Case(
        "T8 bound to nodes",
        tuple(cores(32, 0, 16)),
        ("0-15", "0-15", "16-31", "16-31"),
        (("0-3", "4-7"), ("8-11", "12-15"), ("16-19", "20-23"), ("24-27", "28-31")),
        homes=(0, 0, 1, 1),
    ),
    Case(
        "T10 more ranks than cores",
        tuple(cores(2)),
        ("0-1",) * 4,
        (("0", "0"), ("1", "1"), ("0", "0"), ("1", "1")),
        flags=("shared",),
        threads=(1, 1, 1, 1),
    ),
    Case(
        "T11 one core each",
        tuple(adjacent(2, 2)),
        ("0-3",) * 2,
        (("0", "1"), ("2", "3")),
        flags=("smt",),
    ),
    Case("T12 hybrid", HYBRID, ("0-19",), (("0-12", "13-19"),), threads=(7,)),
    Case("T12 hybrid, two ranks", HYBRID, ("0-19",) * 2, (), unbound=(0, 1)),
    Case("T12 two ranks on fast cores", HYBRID, ("0-11",) * 2, (("0-3", "4"), ("6-9", "10"))),
    Case("T12 hybrid ARM", ARM, ("0-7",), (("4-7", "0-3"),)),
    Case("T12 hybrid ARM, two ranks", ARM, ("0-7",) * 2, (), unbound=(0, 1)),
    Case(
        "T14 quota of 8 cores",
        tuple(cores(64, 64)),
        (ALL_64_SMT,) * 2,
        (("0-1,64-65", "2-3"), ("4-5,68-69", "6-7")),
        quota="800000 100000",
        idle="8-63,72-127",
    ),
    Case(
        "T14 quota of 3.5 cores",
        tuple(cores(64, 64)),
        (ALL_64_SMT,) * 2,
        (("0,64", "1"), ("2,66", "3")),
        quota="350000 100000",
        flags=("throttle_risk",),
        idle="4-63,68-127",
    ),
    Case(
        "T15 nodes 0 and 8, eight threads a core",
        tuple(adjacent(10, 8) + adjacent(10, 8, first=80, node=8)),
        ("0-159",) * 4,
        (("0-23", "24,32"), ("40-63", "64,72"), ("80-103", "104,112"), ("120-143", "144,152")),
        gpu_nodes=(0, 0, 8, 8),
        homes=(0, 0, 8, 8),
        threads=(3, 3, 3, 3),
    ),
    Case(
        "T19 tuned",
        tuple(cores(64, 0, 32)),
        ("0-63",) * 2,
        (("0-21", "22-31"), ("32-53", "54-63")),
        gpu_nodes=(0, 0),
        homes=(0, 1),
        options={"optimizer_cores": 10},
    ),
    Case(
        "T20 accelerator memory is a node",
        tuple(cores(72)),
        ("0-71",),
        (("0-35", "36-71"),),
        gpu_nodes=(1,),
        nodes=(0, 1),
        homes=(0,),
    ),
    Case(
        "T22 a GPU beside 16 virtual cores",
        tuple(cores(16)),
        ("0-15",),
        (("0-1", "2-15"),),
        gpu_nodes=(0,),
        on_cpu=False,
    ),
    Case(
        "T23 eight GPUs, two sockets",
        tuple(cores(96, 96, 48)),
        ("0-191",) * 8,
        tuple(
            (f"{first}-{first + 1},{first + 96}-{first + 97}", f"{first + 2}-{first + 11}")
            for first in range(0, 96, 12)
        ),
        gpu_nodes=(0, 0, 0, 0, 1, 1, 1, 1),
        threads=(2,) * 8,
        on_cpu=False,
    ),
    Case(
        "T24 one GPU, two sockets",
        tuple(cores(64, 0, 32)),
        ("0-63",),
        (("32-35", "0-31,36-63"),),
        gpu_nodes=(1,),
        flags=("split",),
        homes=(1,),
        on_cpu=False,
    ),
    Case("T25 a GPU and three cores", tuple(cores(3)), ("0-2",), (("0-1", "2"),), on_cpu=False),
    Case(
        "T26 two GPUs, four cores",
        tuple(cores(4)),
        ("0-3",) * 2,
        (("0", "1"), ("2", "3")),
        on_cpu=False,
    ),
    Case(
        "T27 three of four GPUs on one node",
        tuple(cores(64, 0, 32)),
        ("0-63",) * 4,
        (("0-1", "2-15"), ("16-17", "18-31"), ("32-33", "34-47"), ("48-49", "50-63")),
        gpu_nodes=(0, 0, 0, 1),
        homes=(0, 0, 1, 1),
        on_cpu=False,
    ),
    Case(
        "T28 fewer ranks than nodes",
        tuple(cores(32, 0, 4)),
        ("0-31",) * 2,
        (("4-5", "0-3,6-15"), ("24-25", "16-23,26-31")),
        gpu_nodes=(1, 6),
        flags=("split",),
        on_cpu=False,
    ),
    Case(
        "T29 threads of one core in two masks",
        tuple(cores(4, 4)),
        ("0-3", "4-7"),
        (),
        unbound=(0, 1),
    ),
    Case("T21 one CPU", tuple(cores(1)), ("0",), (("0", "0"),), flags=("shared",)),
)


def allowed(case: Case) -> list[frozenset[int]]:
    """The masks of a case as sets."""
    return [parse_cpulist(mask) for mask in case.masks]
