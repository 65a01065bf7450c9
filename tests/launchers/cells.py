"""The launch matrix: each launcher with what it needs, and how its recipe is varied."""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from tests.launchers.ssh import sshd

ON_ONE_NODE = ("--nodes 2 --ntasks-per-node 1", "--partition one --nodes 1 --ntasks 2")
"""Of srun: masks that name CPUs of both ranks need both on one node."""


@dataclass(frozen=True)
class Cell:
    """One launcher, started in one way.

    Attributes:
        name: of the test.
        recipe: in docs/multi_node.md.
        programs: which must be on the PATH or in an sbin.
        modules: of Python, which must be installed.
        changes: of the recipe's text.
        confines: the CPUs that the launcher gives to each rank; None: all.
        in_any_order: whether the second rank may be on the first node: torchrun sorts its agents by
            host and process.
        needs_gpu: why, if this makes no sense without one.
        daemons: which of "ssh" and "slurm" must run.
    """

    name: str
    recipe: str
    programs: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()
    changes: Mapping[str, str] = field(default_factory=dict)
    confines: tuple[frozenset[int], frozenset[int]] | None = None
    in_any_order: bool = False
    needs_gpu: str = ""
    daemons: tuple[str, ...] = ()

    def missing(self) -> str:
        """Why this cannot run here; empty if it can."""
        programs = [name for name in self.programs if not installed(name)]
        modules = [name for name in self.modules if importlib.util.find_spec(name) is None]
        if programs or modules:
            return f"not installed: {', '.join([*programs, *modules])} (tools/install_launchers.sh)"
        if self.needs_gpu and not torch.accelerator.is_available():
            return self.needs_gpu
        if "slurm" in self.daemons and (os.cpu_count() or 1) < 2:
            return "two nodes of Slurm on this machine need two CPUs"
        return ""


def installed(name: str) -> bool:
    return (
        sshd()
        if name == "sshd"
        else shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin:/sbin")
    ) is not None


def _halves() -> tuple[frozenset[int], frozenset[int]]:
    cpus = os.cpu_count() or 1
    return frozenset(range(cpus // 2)), frozenset(range(cpus // 2, cpus))


def _srun(
    option: str,
    *,
    confines: tuple[frozenset[int], frozenset[int]] | None,
    on_one_node: bool = False,
) -> Cell:
    changes = {"deepspeed-ext run": f"{option} deepspeed-ext run"}
    if on_one_node:
        changes |= dict([ON_ONE_NODE])
    where = ", one node" if on_one_node else ""
    return Cell(
        f"srun {option}{where}",
        "srun",
        SLURM,
        changes=changes,
        confines=confines,
        daemons=("slurm",),
    )


SLURM = ("srun", "slurmctld", "slurmd")
FIRST_TWO = (frozenset({0}), frozenset({1}))
SSH = ("ssh", "ssh-keygen", "sshd")

CELLS = (
    Cell("deepspeed, pdsh", "deepspeed", ("pdsh", *SSH), daemons=("ssh",)),
    Cell("srun", "srun", SLURM, confines=_halves(), daemons=("slurm",)),
    Cell("mpirun", "mpirun", ("mpirun", *SSH), daemons=("ssh",)),
    Cell("torchrun", "torchrun"),
    _srun("--cpu-bind=none", confines=_halves()),
    _srun("--cpu-bind=cores", confines=_halves()),
    _srun("--cpu-bind=none", confines=None, on_one_node=True),
    _srun("--cpu-bind=cores", confines=FIRST_TWO, on_one_node=True),
    _srun("--cpu-bind=map_cpu:1,0", confines=(FIRST_TWO[1], FIRST_TWO[0]), on_one_node=True),
    _srun("--cpu-bind=mask_cpu:0x1,0x2", confines=FIRST_TWO, on_one_node=True),
    _srun("--mpi=pmi2", confines=_halves()),
    Cell("sbatch", "sbatch", (*SLURM, "sbatch"), confines=_halves(), daemons=("slurm",)),
    Cell(
        "srun, torchrun",
        "srun and torchrun",
        SLURM,
        confines=_halves(),
        in_any_order=True,
        daemons=("slurm",),
    ),
    Cell(
        "mpirun --bind-to core, one node",
        "mpirun",
        ("mpirun",),
        changes={
            "--host node1,node2 --bind-to none "
            "-x PATH -x MASTER_ADDR=node1": "--oversubscribe --bind-to core"
        },
        confines=FIRST_TWO,
    ),
    Cell("mpiexec (Hydra)", "mpiexec", ("mpiexec.hydra", *SSH), daemons=("ssh",)),
    Cell("accelerate", "accelerate", modules=("accelerate",)),
    Cell("Ray Train", "ray", modules=("ray",)),
    Cell(
        "torchrun --numa-binding",
        "torchrun",
        changes={"--no-python": "--numa-binding node --no-python"},
        needs_gpu="--numa-binding binds to the NUMA node "
        "of a rank's GPU, and this machine has none",
    ),
)
EXTRA_LAUNCHERS = ("pdsh", "srun", "mpirun", "mpiexec.hydra", "accelerate", "ray")
"""All but torchrun, which comes with torch."""
