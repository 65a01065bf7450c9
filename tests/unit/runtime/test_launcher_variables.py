"""The variables of srun and MPI become those that DeepSpeed reads; what contradicts itself is
refused."""

from __future__ import annotations

import pytest

from deepspeed_ext.errors import ConfigError
from deepspeed_ext.runtime.launch import NEEDED, LaunchPlan, plan_launch

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
ADDRESS = {"MASTER_ADDR": "node1", "MASTER_PORT": "29400"}

NAMES = (*NEEDED[:3], "LOCAL_WORLD_SIZE", *NEEDED[3:])
SLURMS, MPIS = "5 7 1 2 node01 22573", "1 2 1 2 127.0.0.1 26509"


@pytest.mark.parametrize(
    ("environ", "launcher", "values"),
    [
        (SRUN, "srun", SLURMS),
        ({**SRUN, "PMI_RANK": "5", "PMI_SIZE": "7"}, "srun", SLURMS),
        ({**SRUN, "PMIX_RANK": "5"}, "srun", SLURMS),
        (MPIRUN, "mpirun (Open MPI)", MPIS),
        ({**SRUN, **MPIRUN}, "mpirun (Open MPI)", MPIS),
        (MPIEXEC, "mpiexec (PMI)", "1 2 1 2 127.0.0.1 29500"),
        ({**SRUN, **MPIEXEC}, "mpiexec (PMI)", "1 2 1 2 127.0.0.1 29500"),
    ],
)
def test_a_launchers_variables_become_deepspeeds(
    environ: dict[str, str], launcher: str, values: str
) -> None:
    variables = dict(zip(NAMES, values.split(), strict=True))
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
        ({**SRUN, **BY_HAND, **ADDRESS}, None),  # each task has started two ranks
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
    ("environ", "message"),
    [
        ({**SRUN, "RANK": "0"}, "RANK=0 is set, but srun says 5"),
        ({**SRUN, **BY_HAND, "WORLD_SIZE": "7"}, "RANK=3 is set, but srun says 5"),
        ({**SRUN, "LOCAL_WORLD_SIZE": "7"}, "LOCAL_WORLD_SIZE=7 is set, but srun says 2"),
        ({**SRUN, "SLURM_STEP_NUM_TASKS": "8"}, "5 of 8, and 1 of 0 on its host"),
        ({**SRUN, "SLURM_STEP_NUM_TASKS": ""}, "not started by srun"),
        ({**SRUN, "SLURM_LOCALID": ""}, "missing or malformed .'SLURM_LOCALID'"),
        ({**SRUN, "SLURM_LOCALID": "2"}, "2 of 2 on its host"),
        ({**SRUN, "SLURM_PROCID": "7"}, "7 of 7"),
        ({**SRUN, "SLURM_PROCID": "five"}, "malformed .*'five'"),
        ({**SRUN, "SLURM_NODEID": "4"}, "malformed .* start again"),
        ({**SRUN, "SLURM_STEP_TASKS_PER_NODE": "2(y3),1"}, "malformed"),
        ({**SRUN, "SLURM_HET_SIZE": "2"}, "heterogeneous"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "RANK, WORLD_SIZE is set, but not all of RANK"),
        ({**BY_HAND, "WORLD_SIZE": "3"}, "RANK below WORLD_SIZE"),
        ({**BY_HAND, "LOCAL_RANK": "-1"}, "expected numbers"),
        ({"PMIX_RANK": "0"}, "not how many"),
        (
            {"PMI_RANK": "0", "PMI_SIZE": "2"},
            "mpiexec .* is missing or malformed .'MPI_LOCALRANKID'",
        ),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, "missing or malformed .'OMPI_COMM_WORLD_RANK'"),
    ],
)
def test_contradictions_and_gaps_are_refused(environ: dict[str, str], message: str) -> None:
    """Unless the rank is complete by hand, which then needs no launcher."""
    with pytest.raises(ConfigError, match=message):
        plan_launch(environ)
    if not {*NAMES} & {*environ}:
        by_hand = {**BY_HAND, **ADDRESS}
        assert plan_launch({**environ, **by_hand}) == LaunchPlan(None, {})
        for name in by_hand:
            with pytest.raises(ConfigError):
                plan_launch({**environ, **by_hand, name: ""})


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


@pytest.mark.parametrize(
    ("hostlist", "first"),
    [
        ("node[01-03,7],login", "node01"),
        ("login,node[01-03]", "login"),
        ("rack[2-3]node[010-999]", "rack2node010"),
        ("n[5,1].cluster", "n5.cluster"),
        ("127.0.0.[2-3]", "127.0.0.2"),
    ],
)
def test_the_first_host_of_a_list_has_rank_0(hostlist: str, first: str) -> None:
    plan = plan_launch({**SRUN, "SLURM_STEP_NODELIST": hostlist})
    assert plan.variables["MASTER_ADDR"] == first
