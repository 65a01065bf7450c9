"""Sets the rank variables that DeepSpeed reads and the launcher has not set: maps those of srun,
mpirun and mpiexec, by pure functions of the environment.

DeepSpeed reads RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT.
torchrun, ``deepspeed`` and ``accelerate launch`` set them; srun and MPI use other names.

A value set by hand is used, unless it contradicts the launcher. If everything that a rank needs is
set by hand, the launcher's variables may be incomplete or inconsistent. The host of rank 0 is known
from Slurm, or if all ranks share one host; MPI does not provide it.
"""

import os
import re
import socket
import zlib
from collections.abc import Iterator, Mapping
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

SETS_THEM_ITSELF = {"TORCHELASTIC_RUN_ID": "torchrun", "CROSS_RANK": "deepspeed"}
"""Variables that identify launchers that set everything. If srun starts these, its variables number
launchers, not ranks."""
LEFT_TO_DEEPSPEED = {
    "AZUREML_EXPERIMENT_ID": "Azure Machine Learning",
    "SM_TRAINING_ENV": "SageMaker",
}
"""Services whose variables DeepSpeed maps itself."""

OPEN_MPI = tuple(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))
PMI = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
NEEDED = (*RANK_VARIABLES, "MASTER_ADDR", "MASTER_PORT")
"""The variables that a rank needs without a launcher."""

# Below the ports that Linux hands out by itself, which start at 32768.
FIRST_PORT, PORTS = 20_000, 10_000
DEFAULT_PORT = 29_500  # torch's
JOB_IDS = ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "PMI_JOBID")

_RANGES = r"\[\d{1,18}(?:-\d{1,18})?(?:,\d{1,18}(?:-\d{1,18})?)*\]"
_FIRST_HOST = re.compile(rf"((?:[\w.:-]|{_RANGES})+)(?:,.*)?", re.ASCII)


@dataclass(frozen=True)
class _Place:
    """A process in its job, as its launcher numbers it."""

    launcher: str
    rank: int
    size: int
    local_rank: int
    local_size: int
    job: str = ""
    """The same text on all ranks of a job and, if possible, different for other jobs; empty if
    unknown."""
    address: str | None = None
    """The host of rank 0; None if unknown."""

    def __post_init__(self) -> None:
        if not (
            self.local_rank <= self.rank < self.size
            and self.local_rank < self.local_size <= self.size
        ):
            raise ConfigError(
                f"{self.launcher} numbers this process {self.rank} of {self.size}, and "
                f"{self.local_rank} of {self.local_size} on its host, which cannot be: are "
                "variables of another job set?"
            )


@dataclass(frozen=True)
class LaunchPlan:
    """The variables to set so that DeepSpeed knows its rank."""

    launcher: str | None
    """The launcher that started this process; None if there is none."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Variables to add to the environment, which lacks them."""


def plan_launch(environ: Mapping[str, str]) -> LaunchPlan:
    """Plan the variables that are missing in `environ`.

    Raises:
        ConfigError: the variables contradict each other, or some cannot be determined.
    """
    given = {name: value for name, value in environ.items() if value}
    for variable, launcher in (SETS_THEM_ITSELF | LEFT_TO_DEEPSPEED).items():
        if variable in given:
            return LaunchPlan(launcher)
    try:
        place = _place(given)
    except ConfigError:
        if not all(name in given for name in NEEDED):
            raise
        place = None
    if place is None or _is_numbered_by_hand(given, place):
        _require_numbers_by_hand(given)
        return LaunchPlan(None)
    wanted = {
        "RANK": str(place.rank),
        "WORLD_SIZE": str(place.size),
        "LOCAL_RANK": str(place.local_rank),
        "LOCAL_WORLD_SIZE": str(place.local_size),
    }
    _require_same(given, wanted, place.launcher)
    wanted["MASTER_ADDR"] = given.get("MASTER_ADDR") or _address(place)
    wanted["MASTER_PORT"] = str(_port(given, place))
    return LaunchPlan(
        place.launcher, {name: value for name, value in wanted.items() if name not in given}
    )


def alone(environ: Mapping[str, str], free_port: int) -> Mapping[str, str]:
    """The variables that make a process without a launcher rank 0 of 1, if `environ` lacks them."""
    lone = dict.fromkeys(("RANK", "LOCAL_RANK"), "0") | dict.fromkeys(
        ("WORLD_SIZE", "LOCAL_WORLD_SIZE"), "1"
    )
    lone |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port)}
    return {name: value for name, value in lone.items() if not environ.get(name)}


def _place(given: Mapping[str, str]) -> _Place | None:
    """The place given by the innermost launcher, because srun may start mpirun. None if there is no
    launcher."""
    for find in (_open_mpi, _pmi, _slurm):
        place = find(given)
        if place is not None:
            return place
    if "PMIX_RANK" in given:
        raise ConfigError(
            "PMIX_RANK is set, which gives this process's number but not how many there are: "
            f"start with mpirun or srun, or set all of {', '.join(NEEDED)}"
        )
    return None


def _open_mpi(given: Mapping[str, str]) -> _Place | None:
    if not any(name in given for name in OPEN_MPI):
        return None
    return _of_mpi("mpirun (Open MPI)", given, OPEN_MPI)


def _pmi(given: Mapping[str, str]) -> _Place | None:
    if "PMI_RANK" not in given:
        return None
    if "SLURM_PROCID" in given and not any(name in given for name in PMI[2:]):  # srun --mpi=pmi2
        place = _slurm(given)
        if place is not None:
            _require_same(
                given, {"PMI_RANK": str(place.rank), "PMI_SIZE": str(place.size)}, place.launcher
            )
        return place
    return _of_mpi("mpiexec (PMI)", given, PMI)


def _of_mpi(launcher: str, given: Mapping[str, str], names: tuple[str, ...]) -> _Place:
    rank, size, local_rank, local_size = _numbers(given, names)
    return _Place(launcher, rank, size, local_rank, local_size, _job(given))


def _slurm(given: Mapping[str, str]) -> _Place | None:
    if "SLURM_PROCID" not in given:
        return None
    if "SLURM_STEP_NUM_TASKS" not in given:  # a batch script, outside of srun
        if _number(given, "SLURM_NTASKS", 1) > 1:
            raise ConfigError(
                f"this Slurm job has {given['SLURM_NTASKS']} tasks, but this process was not "
                "started by srun: write `srun deepspeed-ext run ...` into the batch script, or "
                f"set all of {', '.join(NEEDED)} for each rank"
            )
        return None
    if "SLURM_HET_SIZE" in given:
        raise ConfigError(
            "each component of a heterogeneous Slurm job numbers its own tasks: set all of "
            f"{', '.join(NEEDED)} for each task"
        )
    rank, size, local_rank, node = _numbers(
        given, ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_NODEID")
    )
    counts = _value(given, "SLURM_STEP_TASKS_PER_NODE")
    local_size = tasks_on_node(counts, node, size)
    nodes = _value(given, "SLURM_STEP_NODELIST")
    job = f"{_value(given, 'SLURM_JOB_ID')}.{given.get('SLURM_STEP_ID', '')}"
    return _Place("srun", rank, size, local_rank, local_size, job, first_host(nodes))


def first_host(hostlist: str) -> str:
    """Return the first of Slurm's host names, such as node01 of ``node[01-03,7],login``.

    DeepSpeed needs only this one, so ``scontrol show hostnames``, which containers often lack, is
    not called.

    Raises:
        ConfigError: the text is not a list of host names.
    """
    found = _FIRST_HOST.fullmatch(hostlist)
    if found is None:
        raise ConfigError(
            f"SLURM_STEP_NODELIST={quoted(hostlist)}: expected host names such as node[01-03,7]; "
            f"set all of {', '.join(NEEDED)} instead"
        )
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", found[1])


def tasks_on_node(counts: str, node: int, size: int) -> int:
    """Return the number of tasks on a node of a step, from Slurm's counts, such as ``2(x3),1``.

    Args:
        counts: of all nodes.
        node: the node's position in the step.
        size: tasks of the whole step.

    Raises:
        ConfigError: the counts are malformed, do not add up to `size`, or are for fewer nodes.
    """
    groups = list(_groups(counts))
    if sum(tasks * nodes for tasks, nodes in groups) != size:
        raise ConfigError(
            f"SLURM_STEP_TASKS_PER_NODE={quoted(counts)}, but SLURM_STEP_NUM_TASKS={size}: "
            f"start again with srun, or set all of {', '.join(NEEDED)}"
        )
    for tasks, nodes in groups:
        if node < nodes:
            return tasks
        node -= nodes
    raise ConfigError(
        f"SLURM_STEP_TASKS_PER_NODE={quoted(counts)} has too few nodes for SLURM_NODEID: start "
        f"again with srun, or set all of {', '.join(NEEDED)}"
    )


def _groups(counts: str) -> Iterator[tuple[int, int]]:
    """Pairs of tasks per node and number of such nodes."""
    for group in counts.split(","):
        found = re.fullmatch(r"([0-9]{1,9})(?:\(x([0-9]{1,9})\))?", group)
        if found is None:
            raise ConfigError(
                f"SLURM_STEP_TASKS_PER_NODE={quoted(counts)}: "
                f"expected counts such as 2(x3),1, got {quoted(group)}"
            )
        yield int(found[1]), int(found[2] or 1)


def _job(given: Mapping[str, str]) -> str:
    return next((given[name] for name in JOB_IDS if name in given), "")


def _is_numbered_by_hand(given: Mapping[str, str], place: _Place) -> bool:
    """Whether the ranks are not the launcher's processes, for instance if each such process has
    started several ranks."""
    if not all(name in given for name in RANK_VARIABLES):
        return False
    return _number(given, "WORLD_SIZE") != place.size


def _require_numbers_by_hand(given: Mapping[str, str]) -> None:
    """Raise `ConfigError` unless RANK, WORLD_SIZE and LOCAL_RANK are all unset, or all set and
    consistent."""
    missing = [name for name in RANK_VARIABLES if name not in given]
    if len(missing) == len(RANK_VARIABLES):
        return
    if missing:
        present = ", ".join(
            f"{name}={quoted(given[name])}" for name in RANK_VARIABLES if name in given
        )
        raise ConfigError(
            f"{present}, but {' and '.join(missing)} not set, and no launcher was found: set all "
            f"of {', '.join(RANK_VARIABLES)} or none"
        )
    rank, size, local_rank = _numbers(given, RANK_VARIABLES)
    if not local_rank <= rank < size:
        raise ConfigError(
            f"RANK={rank}, WORLD_SIZE={size} and LOCAL_RANK={local_rank}: expected RANK below "
            "WORLD_SIZE, and LOCAL_RANK not above RANK"
        )


def _require_same(given: Mapping[str, str], wanted: Mapping[str, str], launcher: str) -> None:
    for name, value in wanted.items():
        if name in given and _number(given, name) != int(value):
            remedy = "unset it"
            if not all(each in given for each in RANK_VARIABLES):
                remedy += (
                    f", or set all of {', '.join(RANK_VARIABLES)} "
                    "if there are more ranks than it has started"
                )
            raise ConfigError(f"{name}={given[name]} is set, but {launcher} says {value}: {remedy}")


def _address(place: _Place) -> str:
    if place.address is not None:
        return place.address
    if place.local_size == place.size:
        return "127.0.0.1"
    raise ConfigError(
        f"{place.launcher} has started ranks on several hosts and does not name the one of rank 0: "
        "set MASTER_ADDR to it (mpirun -x MASTER_ADDR=HOST; mpiexec -genv MASTER_ADDR HOST)"
    )


def _port(given: Mapping[str, str], place: _Place) -> int:
    """The given port, or one that another job on the same host is unlikely to use."""
    if "MASTER_PORT" in given:
        port = _number(given, "MASTER_PORT")
        if not 1 <= port <= 65535:
            raise ConfigError(f"MASTER_PORT={port}: expected a port from 1 to 65535")
        return port
    if not place.job:
        return DEFAULT_PORT
    return FIRST_PORT + zlib.crc32(place.job.encode(errors="surrogateescape")) % PORTS


def _numbers(given: Mapping[str, str], names: tuple[str, ...]) -> list[int]:
    return [_number(given, name) for name in names]


def _number(given: Mapping[str, str], name: str, default: int | None = None) -> int:
    if name not in given and default is not None:
        return default
    value = _value(given, name)
    if re.fullmatch("[0-9]{1,9}", value) is None:
        raise ConfigError(
            f"the environment variable {name}={quoted(value)}: expected a whole number"
        )
    return int(value)


def _value(given: Mapping[str, str], name: str) -> str:
    if name not in given:
        raise ConfigError(
            f"the environment variable {name} is not set, though others of its launcher are: start "
            f"again, or set all of {', '.join(NEEDED)}"
        )
    return given[name]


def set_launch_variables() -> None:
    """Add the variables of srun or MPI to the environment.

    Raises:
        ConfigError: the variables contradict each other, or some cannot be determined.
    """
    plan = plan_launch(os.environ)
    os.environ.update(plan.variables)
    if plan.variables and os.environ["RANK"] == "0":
        names = ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        found = ", ".join(f"{name}={os.environ[name]}" for name in names)
        logger.info(f"{plan.launcher} started rank 0: {found}")


def find_rank() -> bool:
    """Like `set_launch_variables`. If no launcher has started this process and its rank is not set
    by hand, also make it rank 0 of 1. Return whether the rank is known now.

    Raises:
        ConfigError: as `set_launch_variables`.
    """
    set_launch_variables()
    by_hand = any(os.environ.get(name) for name in RANK_VARIABLES)
    if not by_hand and plan_launch(os.environ).launcher is None:
        os.environ.update(alone(os.environ, _free_port()))
        logger.info(
            "no launcher has started this process, so it is rank 0 of 1; to use several "
            "accelerators, start it with torchrun, deepspeed, accelerate, srun or mpirun"
        )
    return all(os.environ.get(name) for name in NEEDED)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
