"""Target: the variables of launchers. They give a complete place in the job, or an error that is
meant for the user."""

from __future__ import annotations

import os
import random
from pathlib import Path

from deepspeed_ext.errors import ConfigError
from deepspeed_ext.runtime.launcher_variables import (
    JOB_IDS,
    LEFT_TO_DEEPSPEED,
    OPEN_MPI,
    PMI,
    SETS_THEM_ITSELF,
    plan_launch,
)
from tests.fuzz import values
from tests.fuzz.target import Parts, Target, require

SET = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
JOBS: dict[str, dict[str, str]] = {
    "srun": {
        "SLURM_PROCID": "3",
        "SLURM_LOCALID": "1",
        "SLURM_NODEID": "1",
        "SLURM_JOB_ID": "71",
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_TASKS": "4",
        "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
        "SLURM_STEP_NODELIST": "node[07-08]",
    },
    "mpirun": {
        **dict(zip(OPEN_MPI, "3414", strict=True)),
        "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
        "PMIX_NAMESPACE": "9",
    },
    "mpiexec": dict(zip(PMI, ("0", "2", "0", "2"), strict=True)),
    "by hand": {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0"},
    "none": {},
}
NAMES = sorted(
    {
        *SET,
        *JOB_IDS,
        *LEFT_TO_DEEPSPEED,
        *SETS_THEM_ITSELF,
        *(name for job in JOBS.values() for name in job),
    }
)
OTHERS = (
    "SLURM_HET_SIZE",
    "SLURM_NTASKS",
    "PMIX_RANK",
    "SLURM_STEP_NODELIST",
    "SLURM_STEP_TASKS_PER_NODE",
)
TEXTS = (
    "0",
    "1",
    "2",
    "3",
    "4",
    "29500",
    "2(x2)",
    "1(x4)",
    "2(x999999999)",
    "3,1",
    "node1",
    "a[1",
    "a[]",
    "[1]",
    "a]b",
    ",",
)


def make(rng: random.Random) -> Parts:
    """A launcher's variables, most of them as they should be, and others."""
    parts: Parts = list(JOBS[rng.choice(list(JOBS))].items())
    for _ in range(rng.choice([0, 0, 1, 2, 6])):
        parts.append(
            (
                rng.choice([*NAMES, *OTHERS]),
                rng.choice(TEXTS) if rng.random() < 0.7 else values.text(rng),
            )
        )
    return [part for part in parts if rng.random() < 0.95]


def run(parts: Parts, folder: Path) -> None:
    environ = dict(parts)
    before = dict(environ)
    try:
        plan = plan_launch(environ)
    except ConfigError as error:
        require(str(error))
        require(len(str(error)) < 1000, "an error of many lines")
        return
    assert environ == before
    assert not [name for name in plan.variables if environ.get(name)], (
        "a value of the user's is replaced"
    )
    if plan.variables:
        complete = {name: plan.variables.get(name) or environ[name] for name in SET}
        rank, size, local_rank, local_size = (int(complete[name]) for name in SET[:4])
        assert local_rank <= rank < size
        assert local_rank < local_size <= size
        assert 1 <= int(complete["MASTER_PORT"]) <= 65535
        os.fsencode(plan.variables.get("MASTER_ADDR", ""))
    elif any(environ.get(name) for name in SET[:3]) and plan.launcher is None:
        assert int(environ["RANK"]) < int(environ["WORLD_SIZE"])


TARGET = Target("launch", make, run)
