"""Sets the rank variables that DeepSpeed reads and the launcher has not set: maps those of srun,
mpirun and mpiexec, by pure functions of the environment.

torchrun, ``deepspeed`` and ``accelerate launch`` set all of `NEEDED`; srun and MPI use other names.
If all of `NEEDED` are set by hand, they count as they are; fewer must agree with the launcher. The
host of rank 0 is known from Slurm, or if all ranks share one host; MPI does not provide it.
"""

from __future__ import annotations

import os
import re
import socket
import zlib
from collections.abc import Mapping
from typing import NamedTuple

from deepspeed_ext.errors import ConfigError
from deepspeed_ext.runtime.log import logger

SET_EVERYTHING = {
    "TORCHELASTIC_RUN_ID": "torchrun",
    "CROSS_RANK": "deepspeed",
    "AZUREML_EXPERIMENT_ID": "Azure Machine Learning",
    "SM_TRAINING_ENV": "SageMaker",
}
"""Variables that identify a launcher that sets everything, or a service whose variables DeepSpeed
maps itself. If srun starts these, its variables number launchers, not ranks."""
OPEN_MPI = [f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")]
PMI = ["PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"]
SRUN = ["SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_NODEID"]
JOB_IDS = ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "PMI_JOBID")
NUMBERS = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"]
NEEDED = (*NUMBERS[:3], "MASTER_ADDR", "MASTER_PORT")
"""The variables that a rank needs without a launcher."""
SET_ALL = f"set all of {', '.join(NEEDED)}"
# Below the ports that Linux hands out by itself, which start at 32768.
FIRST_PORT, PORTS, TORCHS_PORT = 20_000, 10_000, 29_500


class LaunchPlan(NamedTuple):
    """The launcher that started this process, if any, and the variables that are missing."""

    launcher: str | None
    variables: Mapping[str, str]


def plan_launch(environ: Mapping[str, str]) -> LaunchPlan:
    """Plan the variables that are missing in `environ`.

    Raises:
        ConfigError: the variables contradict each other, or some cannot be determined.
    """
    given = {name: value for name, value in environ.items() if value}
    for variable, launcher in SET_EVERYTHING.items():
        if variable in given:
            return LaunchPlan(launcher, {})
    is_by_hand = all(name in given for name in NEEDED)
    if not is_by_hand and (found := _launched(given)) is not None:
        return _missing(given, found)
    by_hand = [name for name in NUMBERS[:3] if name in given]
    if len(by_hand) == 3:
        rank, size, local_rank = (given[name][:40] for name in by_hand)
        is_right = all(given[name].isdecimal() for name in by_hand)
        if not is_right or not int(local_rank) <= int(rank) < int(size):
            raise ConfigError(
                f"RANK={rank}, WORLD_SIZE={size} and LOCAL_RANK={local_rank}: expected numbers, "
                "RANK below WORLD_SIZE, and LOCAL_RANK not above RANK"
            )
    elif by_hand:
        raise ConfigError(
            f"{', '.join(by_hand)} is set, but not all of {', '.join(NUMBERS[:3])}, and no "
            "launcher was found: set all or none"
        )
    return LaunchPlan(None, {})


def _missing(given: Mapping[str, str], found: LaunchPlan) -> LaunchPlan:
    """The variables of a launcher that are not given, unless some contradict it."""
    for name in NUMBERS:
        if given.get(name, wanted := found.variables[name]) != wanted:
            raise ConfigError(
                f"{name}={given[name][:40]} is set, but {found.launcher} says {wanted}: unset "
                f"it, or {SET_ALL} if there are more ranks than it has started"
            )
    if not found.variables["MASTER_ADDR"] and "MASTER_ADDR" not in given:
        raise ConfigError(
            f"{found.launcher} has started ranks on several hosts and does not name the one of "
            "rank 0: set MASTER_ADDR to it (mpirun -x MASTER_ADDR=HOST; mpiexec -genv MASTER_ADDR "
            "HOST)"
        )
    missing = {name: text for name, text in found.variables.items() if name not in given}
    return LaunchPlan(found.launcher, missing)


def _launched(given: Mapping[str, str]) -> LaunchPlan | None:
    """The innermost launcher, because srun may start mpirun, with all variables as it has them, and
    MASTER_ADDR empty if it does not know; None: there is none."""
    if any(name in given for name in OPEN_MPI):
        launcher, names = "mpirun (Open MPI)", OPEN_MPI
    elif "PMI_RANK" in given and (
        "SLURM_PROCID" not in given or any(name in given for name in PMI[2:])
    ):
        launcher, names = "mpiexec (PMI)", PMI
    elif "SLURM_PROCID" in given:  # also srun --mpi=pmi2
        if "SLURM_STEP_NUM_TASKS" not in given and given.get("SLURM_NTASKS", "1") == "1":
            return None  # a batch script, outside of srun
        _require_task(given)
        launcher, names = "srun", SRUN
    elif "PMIX_RANK" in given:
        raise ConfigError(
            "PMIX_RANK is set, which gives this process's number but not how many there are: "
            f"start with mpirun or srun, or {SET_ALL}"
        )
    else:
        return None
    job, address = next((given[name] for name in JOB_IDS if name in given), ""), ""
    try:
        rank, size, local_rank, local_size = (int(given[name]) for name in names)
        if names is SRUN:  # whose fourth is the node's number
            nodes = given["SLURM_STEP_TASKS_PER_NODE"].split(",")  # such as 2(x3),1
            groups = [node.rstrip(")").partition("(x") for node in nodes]
            tasks = [int(tasks) for tasks, _, times in groups for _ in range(int(times or 1))]
            local_size = tasks[local_size] if sum(tasks) == size else 0
            job = f"{given['SLURM_JOB_ID']}.{given.get('SLURM_STEP_ID', '')}"
            # node01 of node[01-03,7],login; containers often lack `scontrol show hostnames`
            hosts = re.sub(r"\[(\d+)[^\]]*\]", r"\1", given["SLURM_STEP_NODELIST"])
            address = hosts.split(",")[0]
    except (KeyError, ValueError, IndexError) as error:
        raise ConfigError(
            f"a variable of {launcher} is missing or malformed ({error}): start again, or {SET_ALL}"
        ) from None
    if not (0 <= local_rank <= rank < size and local_rank < local_size <= size):
        raise ConfigError(
            f"{launcher} numbers this process {rank} of {size}, and {local_rank} of {local_size} "
            f"on its host, which cannot be: are variables of another job set? If so, {SET_ALL}"
        )
    wanted = dict(zip(NUMBERS, map(str, (rank, size, local_rank, local_size)), strict=True))
    wanted["MASTER_ADDR"] = address or ("127.0.0.1" if local_size == size else "")
    # a port that another job on the same host is unlikely to use
    port = FIRST_PORT + zlib.crc32(job.encode(errors="surrogateescape")) % PORTS
    wanted["MASTER_PORT"] = str(port if job else TORCHS_PORT)
    return LaunchPlan(launcher, wanted)


def _require_task(given: Mapping[str, str]) -> None:
    if "SLURM_STEP_NUM_TASKS" not in given:
        raise ConfigError(
            f"this Slurm job has {given['SLURM_NTASKS']} tasks, but this process was not "
            "started by srun: write `srun deepspeed-ext run ...` into the batch script, or "
            f"{SET_ALL} for each rank"
        )
    if "SLURM_HET_SIZE" in given:
        raise ConfigError(
            f"each component of a heterogeneous Slurm job numbers its own tasks: {SET_ALL} for "
            "each task"
        )


def set_launch_variables() -> LaunchPlan:
    """Add the variables of srun or MPI to the environment, and return the plan.

    Raises:
        ConfigError: the variables contradict each other, or some cannot be determined.
    """
    plan = plan_launch(os.environ)
    os.environ.update(plan.variables)
    if plan.variables and os.environ["RANK"] == "0":
        names = ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        values = ", ".join(f"{name}={os.environ[name]}" for name in names)
        logger.info(f"{plan.launcher} started rank 0: {values}")
    return plan


def find_rank() -> bool:
    """Like `set_launch_variables`. If no launcher has started this process and its rank is not set
    by hand, also make it rank 0 of 1. Return whether the rank is known now.

    Raises:
        ConfigError: as `set_launch_variables`.
    """
    plan = set_launch_variables()
    if plan.launcher is None and not any(os.environ.get(name) for name in NUMBERS[:3]):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = str(probe.getsockname()[1])
        alone = zip((*NUMBERS, *NEEDED[3:]), (*"0101", "127.0.0.1", port), strict=True)
        os.environ.update({name: text for name, text in alone if not os.environ.get(name)})
        logger.info(
            "no launcher has started this process, so it is rank 0 of 1; to use several "
            "accelerators, start it with torchrun, deepspeed, accelerate, srun or mpirun"
        )
    return all(os.environ.get(name) for name in NEEDED)
