"""The variables of srun and MPI become those that DeepSpeed reads; what contradicts itself is
refused."""

from __future__ import annotations

import pytest

from deepspeed_ext.errors import ConfigError
from deepspeed_ext.runtime.launch import (
    LaunchPlan,
    first_host,
    plan_launch,
    tasks_on_node,
)

SRUN = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2",
    "SLURM_NTASKS": "7",
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_STEP_TASKS_PER_NODE": "2(x3),1",
    "SLURM_STEP_NODELIST": "node[01-03,7]",
}
MPIRUN = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_RANK": "1",
    "PMIX_NAMESPACE": "1353777153",
}
TWO_HOSTS = {**MPIRUN, "OMPI_COMM_WORLD_LOCAL_RANK": "0", "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}
MPIEXEC = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
BY_HAND = {"RANK": "3", "WORLD_SIZE": "14", "LOCAL_RANK": "1"}


def of(
    rank: int, size: int, local_rank: int, local_size: int, address: str, port: int
) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(local_size),
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
    }


@pytest.mark.parametrize(
    ("environ", "launcher", "variables"),
    [
        (SRUN, "srun", of(5, 7, 1, 2, "node01", 22573)),
        ({**SRUN, "PMI_RANK": "5", "PMI_SIZE": "7"}, "srun", of(5, 7, 1, 2, "node01", 22573)),
        ({**SRUN, "PMIX_RANK": "5"}, "srun", of(5, 7, 1, 2, "node01", 22573)),
        (MPIRUN, "mpirun (Open MPI)", of(1, 2, 1, 2, "127.0.0.1", 26509)),
        ({**SRUN, **MPIRUN}, "mpirun (Open MPI)", of(1, 2, 1, 2, "127.0.0.1", 26509)),
        (MPIEXEC, "mpiexec (PMI)", of(1, 2, 1, 2, "127.0.0.1", 29500)),
        ({**SRUN, **MPIEXEC}, "mpiexec (PMI)", of(1, 2, 1, 2, "127.0.0.1", 29500)),
    ],
    ids=[
        "srun",
        "srun-pmi2",
        "srun-pmix",
        "mpirun",
        "mpirun-in-slurm",
        "mpiexec",
        "mpiexec-in-slurm",
    ],
)
def test_a_launchers_variables_become_deepspeeds(
    environ: dict[str, str], launcher: str, variables: dict[str, str]
) -> None:
    assert plan_launch(environ) == LaunchPlan(launcher, variables)
    assert plan_launch({**environ, "RANK": ""}).variables["RANK"] == variables["RANK"]


def test_mpi_on_several_hosts_needs_the_address_of_rank_0() -> None:
    with pytest.raises(ConfigError, match="set MASTER_ADDR"):
        plan_launch(TWO_HOSTS)
    plan = plan_launch({**TWO_HOSTS, "MASTER_ADDR": "node9"})
    assert plan.variables["LOCAL_WORLD_SIZE"] == "1"
    assert "MASTER_ADDR" not in plan.variables


@pytest.mark.parametrize(
    ("environ", "launcher"),
    [
        ({}, None),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "1"}, None),  # a batch script
        ({"SLURM_JOB_ID": "1", "SLURM_NTASKS": "4"}, None),  # the shell of salloc
        (BY_HAND, None),
        ({**SRUN, **BY_HAND}, None),  # each task has started two ranks
        ({**SRUN, **BY_HAND, "TORCHELASTIC_RUN_ID": "x"}, "torchrun"),
        ({**SRUN, "RANK": "0", "WORLD_SIZE": "7", "CROSS_RANK": "1"}, "deepspeed"),
        ({**TWO_HOSTS, "SM_TRAINING_ENV": "{}"}, "SageMaker"),
    ],
)
def test_what_is_complete_stays(environ: dict[str, str], launcher: str | None) -> None:
    assert plan_launch(environ) == LaunchPlan(launcher, {})


def test_values_set_by_hand_count() -> None:
    by_hand = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "1234", "WORLD_SIZE": "7"}
    plan = plan_launch({**SRUN, **by_hand})
    assert plan.variables == {"RANK": "5", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"RANK": "0"}, "RANK=0 is set, but srun says 5"),
        ({"RANK": "0", "WORLD_SIZE": "7", "LOCAL_RANK": "0"}, "RANK=0 is set, but srun says 5"),
        ({"WORLD_SIZE": "8"}, "WORLD_SIZE=8 is set, but srun says 7"),
        ({"LOCAL_WORLD_SIZE": "7"}, "LOCAL_WORLD_SIZE=7 is set, but srun says 2"),
        ({"SLURM_STEP_NUM_TASKS": "8"}, "SLURM_STEP_NUM_TASKS=8"),
        ({"SLURM_STEP_NUM_TASKS": None}, "not started by srun"),
        ({"SLURM_LOCALID": None}, "SLURM_LOCALID is not set"),
        ({"SLURM_LOCALID": "2"}, "2 of 2 on its host"),
        ({"SLURM_PROCID": "7"}, "7 of 7"),
        ({"SLURM_PROCID": "five"}, "SLURM_PROCID='five': expected a whole number"),
        ({"SLURM_NODEID": "4"}, "SLURM_NODEID=4; start again"),
        ({"SLURM_STEP_TASKS_PER_NODE": "2(x3,1"}, "expected counts"),
        ({"SLURM_STEP_NODELIST": "node["}, "expected host names"),
        ({"SLURM_HET_SIZE": "2"}, "heterogeneous"),
    ],
)
def test_contradictions_and_gaps_of_slurm_are_refused(
    changes: dict[str, str | None], message: str
) -> None:
    environ = {name: value for name, value in {**SRUN, **changes}.items() if value is not None}
    with pytest.raises(ConfigError, match=message):
        plan_launch(environ)


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"RANK": "0", "WORLD_SIZE": "2"}, "RANK, WORLD_SIZE is set, but not all of RANK"),
        ({"LOCAL_RANK": "0"}, "LOCAL_RANK is set, but not all"),
        ({**BY_HAND, "WORLD_SIZE": "3"}, "expected RANK below WORLD_SIZE"),
        ({**BY_HAND, "LOCAL_RANK": "-1"}, "expected a whole number"),
        ({"PMIX_RANK": "0"}, "not how many"),
        ({"PMI_RANK": "0", "PMI_SIZE": "2"}, "MPI_LOCALRANKID is not set"),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, "OMPI_COMM_WORLD_RANK is not set"),
    ],
)
def test_gaps_of_others_are_refused(environ: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan_launch(environ)


def test_all_tasks_of_a_step_get_one_address_and_port_and_all_ranks() -> None:
    tasks = [(0, 0, 0), (1, 1, 0), (2, 0, 1), (3, 1, 1), (4, 0, 2), (5, 1, 2), (6, 0, 3)]
    names = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID")
    plans = [
        plan_launch({**SRUN, **dict(zip(names, map(str, task), strict=True))}).variables
        for task in tasks
    ]
    assert [plan["RANK"] for plan in plans] == list("0123456")
    assert [plan["LOCAL_WORLD_SIZE"] for plan in plans] == list("2222221")
    assert (
        len({(plan["MASTER_ADDR"], plan["MASTER_PORT"], plan["WORLD_SIZE"]) for plan in plans}) == 1
    )
    ports = {
        plan_launch({**SRUN, "SLURM_STEP_ID": str(step)}).variables["MASTER_PORT"]
        for step in range(20)
    }
    assert len(ports) > 15  # steps of one job may share a host


UNREADABLE: dict[str, dict[str, str | None]] = {
    "PMIx": {**dict.fromkeys(SRUN), "PMIX_RANK": "5"},
    "heterogeneous": {"SLURM_HET_SIZE": "2"},
    "batch script": {"SLURM_STEP_NUM_TASKS": None},
    "hosts": {"SLURM_STEP_NODELIST": "node["},
    "counts": {"SLURM_STEP_TASKS_PER_NODE": "2(x3,1"},
    "incomplete": {"SLURM_LOCALID": None},
    "impossible": {"SLURM_PROCID": "7"},
}


@pytest.mark.parametrize("way", UNREADABLE)
def test_a_rank_that_is_complete_by_hand_needs_no_launcher(way: str) -> None:
    """As the errors say; also one that a batch script starts itself."""
    environ = {
        name: value for name, value in {**SRUN, **UNREADABLE[way]}.items() if value is not None
    }
    by_hand = {**BY_HAND, "WORLD_SIZE": "7", "MASTER_ADDR": "node1", "MASTER_PORT": "29400"}
    assert plan_launch({**environ, **by_hand}) == LaunchPlan(None, {})
    for name in by_hand:
        with pytest.raises(ConfigError):
            plan_launch({**environ, **by_hand, name: ""})
    with pytest.raises(ConfigError, match="expected RANK below WORLD_SIZE"):
        plan_launch({**environ, **by_hand, "RANK": "7"})


@pytest.mark.parametrize(
    ("hostlist", "first"),
    [
        ("node[01-03,7]", "node01"),
        ("node[01-03,7],login", "node01"),
        ("login,node[01-03]", "login"),
        ("rack[2-3]node[010-999]", "rack2node010"),
        ("n[5,1].cluster", "n5.cluster"),
        ("127.0.0.[2-3]", "127.0.0.2"),
        ("localhost", "localhost"),
    ],
)
def test_the_first_host_of_a_list(hostlist: str, first: str) -> None:
    assert first_host(hostlist) == first


@pytest.mark.parametrize("hostlist", ["", ",", "a[]", "a[1", "a[x]", "a b", "a[1]]"])
def test_what_is_no_list_of_hosts_is_refused(hostlist: str) -> None:
    with pytest.raises(ConfigError, match="expected host names"):
        first_host(hostlist)


@pytest.mark.parametrize(("node", "tasks"), [(0, 2), (2, 2), (3, 1), (4, 16)])
def test_tasks_on_a_node(node: int, tasks: int) -> None:
    assert tasks_on_node("2(x3),1,16", node, 23) == tasks
