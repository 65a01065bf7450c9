"""Sets the rank variables that DeepSpeed reads and the launcher has not set: maps those of srun,
mpirun and mpiexec, by pure functions of the environment.

DeepSpeed reads RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT.
torchrun, ``deepspeed`` and ``accelerate launch`` set them; srun and MPI use other names.

A value set by hand is used, unless it contradicts the launcher. If everything that a rank needs is
set by hand, the launcher's variables may be incomplete or inconsistent. The host of rank 0 is known
from Slurm, or if all ranks share one host; MPI does not provide it.
"""

from __future__ import annotations

import os
import re
import socket
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field

from deepspeed_ext.errors import ConfigError
from deepspeed_ext.runtime.log import logger, quoted

__all__ = [
    "LaunchPlan",
    "NEEDED",
    "find_rank",
    "first_host",
    "plan_launch",
    "set_launch_variables",
    "tasks_on_node",
]

SET_EVERYTHING = {
    "TORCHELASTIC_RUN_ID": "torchrun",
    "CROSS_RANK": "deepspeed",
    "AZUREML_EXPERIMENT_ID": "Azure Machine Learning",
    "SM_TRAINING_ENV": "SageMaker",
}
"""Variables that identify a launcher that sets everything, or a service whose variables DeepSpeed
maps itself. If srun starts these, its variables number launchers, not ranks."""

OPEN_MPI = tuple(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))
PMI = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
JOB_IDS = ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "PMI_JOBID")
SRUN = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_NODEID")
NUMBERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
RANK_VARIABLES = NUMBERS[:3]
NEEDED = (*RANK_VARIABLES, "MASTER_ADDR", "MASTER_PORT")
"""The variables that a rank needs without a launcher."""
SET_ALL = f"set all of {', '.join(NEEDED)}"

# Below the ports that Linux hands out by itself, which start at 32768.
FIRST_PORT, PORTS = 20_000, 10_000
DEFAULT_PORT = 29_500  # torch's


@dataclass(frozen=True)
class LaunchPlan:
    """The variables to set so that DeepSpeed knows its rank."""

    launcher: str | None
    """The launcher that started this process; None if there is none."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Variables to add to the environment, which lacks them."""


@dataclass(frozen=True)
class _Place:
    """A process in its job, as its launcher numbers it."""

    launcher: str
    numbers: tuple[int, ...]
    """Of `NUMBERS`."""
    job: str
    """The same text on all ranks of a job and, if possible, different for other jobs; empty if
    unknown."""
    address: str | None
    """The host of rank 0; None if unknown."""


def plan_launch(environ: Mapping[str, str]) -> LaunchPlan:
    """Plan the variables that are missing in `environ`.

    Raises:
        ConfigError: the variables contradict each other, or some cannot be determined.
    """
    given = {name: value for name, value in environ.items() if value}
    for variable, launcher in SET_EVERYTHING.items():
        if variable in given:
            return LaunchPlan(launcher)
    try:
        place = _place(given)
    except ConfigError:
        if not all(name in given for name in NEEDED):
            raise
        place = None
    by_hand = [name for name in RANK_VARIABLES if name in given]
    if by_hand == list(RANK_VARIABLES):
        rank, size, local_rank = _numbers(given, RANK_VARIABLES)
        if not local_rank <= rank < size:
            raise ConfigError(
                f"RANK={rank}, WORLD_SIZE={size} and LOCAL_RANK={local_rank}: expected RANK below "
                "WORLD_SIZE, and LOCAL_RANK not above RANK"
            )
        if place is not None and size != place.numbers[1]:
            place = None  # each process of the launcher has started several ranks
    elif by_hand and place is None:
        raise ConfigError(
            f"{', '.join(by_hand)} is set, but not all of {', '.join(RANK_VARIABLES)}, and no "
            "launcher was found: set all or none"
        )
    if place is None:
        return LaunchPlan(None)
    wanted = dict(zip(NUMBERS, map(str, place.numbers), strict=True))
    for name, value in wanted.items():
        if name in given and given[name] != value:
            raise ConfigError(
                f"{name}={given[name][:40]} is set, but {place.launcher} says {value}: unset "
                f"it, or {SET_ALL} if there are more ranks than it has started"
            )
    wanted["MASTER_ADDR"] = given.get("MASTER_ADDR") or _address(place)
    wanted["MASTER_PORT"] = str(_port(place.job))
    return LaunchPlan(
        place.launcher, {name: value for name, value in wanted.items() if name not in given}
    )


def _place(given: Mapping[str, str]) -> _Place | None:
    """The place given by the innermost launcher, because srun may start mpirun. None if there is no
    launcher."""
    job = next((given[name] for name in JOB_IDS if name in given), "")
    if any(name in given for name in OPEN_MPI):
        return _checked(_Place("mpirun (Open MPI)", _numbers(given, OPEN_MPI), job, None))
    by_pmi = "PMI_RANK" in given
    if by_pmi and ("SLURM_PROCID" not in given or any(name in given for name in PMI[2:])):
        return _checked(_Place("mpiexec (PMI)", _numbers(given, PMI), job, None))
    if "SLURM_PROCID" in given:  # also srun --mpi=pmi2
        return _slurm(given)
    if "PMIX_RANK" in given:
        raise ConfigError(
            "PMIX_RANK is set, which gives this process's number but not how many there are: "
            f"start with mpirun or srun, or {SET_ALL}"
        )
    return None


def _checked(place: _Place) -> _Place:
    rank, size, local_rank, local_size = place.numbers
    if not (local_rank <= rank < size and local_rank < local_size <= size):
        raise ConfigError(
            f"{place.launcher} numbers this process {rank} of {size}, and {local_rank} of "
            f"{local_size} on its host, which cannot be: are variables of another job set?"
        )
    return place


def _slurm(given: Mapping[str, str]) -> _Place | None:
    if "SLURM_STEP_NUM_TASKS" not in given:  # a batch script, outside of srun
        if given.get("SLURM_NTASKS", "1") != "1":
            raise ConfigError(
                f"this Slurm job has {given['SLURM_NTASKS']} tasks, but this process was not "
                "started by srun: write `srun deepspeed-ext run ...` into the batch script, or "
                f"{SET_ALL} for each rank"
            )
        return None
    if "SLURM_HET_SIZE" in given:
        raise ConfigError(
            f"each component of a heterogeneous Slurm job numbers its own tasks: {SET_ALL} for "
            "each task"
        )
    rank, size, local_rank, node = _numbers(given, SRUN)
    local_size = tasks_on_node(_value(given, "SLURM_STEP_TASKS_PER_NODE"), node, size)
    job = f"{_value(given, 'SLURM_JOB_ID')}.{given.get('SLURM_STEP_ID', '')}"
    address = first_host(_value(given, "SLURM_STEP_NODELIST"))
    return _checked(_Place("srun", (rank, size, local_rank, local_size), job, address))


def first_host(hostlist: str) -> str:
    """Return the first of Slurm's host names, such as node01 of ``node[01-03,7],login``.

    DeepSpeed needs only this one, so ``scontrol show hostnames``, which containers often lack, is
    not called.

    Raises:
        ConfigError: the text is not a list of host names.
    """
    found = re.match(r"(?:[\w.:-]|\[\d[\d,-]*\])+(?=,|$)", hostlist, re.ASCII)
    if found is None:
        raise ConfigError(
            f"SLURM_STEP_NODELIST={quoted(hostlist)}: expected host names such as node[01-03,7]; "
            f"{SET_ALL} instead"
        )
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", found[0])


def tasks_on_node(counts: str, node: int, size: int) -> int:
    """Return the number of tasks on a node of a step, from Slurm's counts, such as ``2(x3),1``.

    Args:
        counts: of all nodes.
        node: the node's position in the step.
        size: tasks of the whole step.

    Raises:
        ConfigError: the counts are malformed, do not add up to `size`, or are for fewer nodes.
    """
    groups = [re.fullmatch(r"(\d{1,9})(?:\(x(\d{1,6})\))?", group) for group in counts.split(",")]
    tasks = [int(group[1]) for group in groups if group for _ in range(int(group[2] or 1))]
    if not all(groups) or sum(tasks) != size or node >= len(tasks):
        raise ConfigError(
            f"SLURM_STEP_TASKS_PER_NODE={quoted(counts)}: expected counts such as 2(x3),1 for "
            f"SLURM_STEP_NUM_TASKS={size} and SLURM_NODEID={node}; start again with srun, or "
            f"{SET_ALL}"
        )
    return tasks[node]


def _address(place: _Place) -> str:
    if place.address is not None:
        return place.address
    if place.numbers[3] == place.numbers[1]:
        return "127.0.0.1"
    raise ConfigError(
        f"{place.launcher} has started ranks on several hosts and does not name the one of rank 0: "
        "set MASTER_ADDR to it (mpirun -x MASTER_ADDR=HOST; mpiexec -genv MASTER_ADDR HOST)"
    )


def _port(job: str) -> int:
    """A port that another job on the same host is unlikely to use."""
    if not job:
        return DEFAULT_PORT
    return FIRST_PORT + zlib.crc32(job.encode(errors="surrogateescape")) % PORTS


def _numbers(given: Mapping[str, str], names: tuple[str, ...]) -> tuple[int, ...]:
    for name in names:
        if not re.fullmatch("[0-9]{1,9}", _value(given, name)):
            raise ConfigError(
                f"the environment variable {name}={quoted(given[name])}: expected a whole number"
            )
    return tuple(int(given[name]) for name in names)


def _value(given: Mapping[str, str], name: str) -> str:
    if name not in given:
        raise ConfigError(
            f"the environment variable {name} is not set, though others of its launcher are: start "
            f"again, or {SET_ALL}"
        )
    return given[name]


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
    if plan.launcher is None and not any(os.environ.get(name) for name in RANK_VARIABLES):
        alone = dict(zip(NUMBERS, "0101", strict=True))
        alone |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
        os.environ.update({name: text for name, text in alone.items() if not os.environ.get(name)})
        logger.info(
            "no launcher has started this process, so it is rank 0 of 1; to use several "
            "accelerators, start it with torchrun, deepspeed, accelerate, srun or mpirun"
        )
    return all(os.environ.get(name) for name in NEEDED)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
