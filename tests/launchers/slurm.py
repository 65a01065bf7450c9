"""A private Slurm: one slurmctld and three slurmd on this machine, in a folder of its own, without
munge.

The first two nodes have half of the CPUs each, as two machines would. The third has all of them,
for several tasks on one node. Each has a loopback address as its name, so that ranks can use the
names that Slurm tells them.
"""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
from pathlib import Path

from tests.launchers.processes import Daemons, free_ports
from tests.launchers.ssh import NODES

WHOLE_NODE = "127.0.0.4"


class PrivateSlurm:
    """A running Slurm whose commands need ``SLURM_CONF=`` `config`.

    Args:
        folder: an empty folder.
        environment: of the daemons, hence of nothing that is started.
    """

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        self.config = folder / "slurm.conf"
        self._environment = {**environment, "SLURM_CONF": str(self.config)}
        self._daemons = Daemons(folder)
        self.config.write_text("\n".join(self._lines(folder, free_ports(4))) + "\n")
        (folder / "state").mkdir()
        command = ("-D", "-f", str(self.config))
        self._daemons.start(
            "slurmctld", self._path("slurmctld"), *command, environment=self._environment
        )
        for node in (*NODES, WHOLE_NODE):
            slurmd = (self._path("slurmd"), *command, "-N", node)
            self._daemons.start(f"slurmd-{node}", *slurmd, environment=self._environment)
        self._daemons.wait_for(self._is_idle, "Slurm with three idle nodes")

    def _lines(self, folder: Path, ports: list[int]) -> list[str]:
        cpus = os.cpu_count() or 1
        halves = [list(range(cpus // 2)), list(range(cpus // 2, cpus))]
        user = pwd.getpwuid(os.geteuid()).pw_name
        specialized = [f" CpuSpecList={','.join(map(str, half))}" for half in reversed(halves)]
        nodes = [
            f"NodeName={node} NodeAddr={node} NodeHostname=localhost "
            f"Port={port} CPUs={cpus}{reserved}"
            for node, port, reserved in zip(
                (*NODES, WHOLE_NODE), ports[1:], [*specialized, ""], strict=True
            )
        ]
        return [
            "ClusterName=private",
            "SlurmctldHost=localhost(127.0.0.1)",
            f"SlurmctldPort={ports[0]}",
            f"SlurmUser={user}",
            f"SlurmdUser={user}",
            "AuthType=auth/none",
            "CredType=cred/none",
            f"StateSaveLocation={folder}/state",
            f"SlurmdSpoolDir={folder}/spool-%n",
            f"SlurmctldPidFile={folder}/slurmctld.pid",
            f"SlurmdPidFile={folder}/slurmd-%n.pid",
            "MailProg=/bin/true",
            "ProctrackType=proctrack/linuxproc",
            "TaskPlugin=task/affinity",
            "SwitchType=switch/none",
            "JobAcctGatherType=jobacct_gather/none",
            "AccountingStorageType=accounting_storage/none",
            "MpiDefault=none",
            "SelectType=select/cons_tres",
            "SelectTypeParameters=CR_CPU",
            "ReturnToService=2",
            *nodes,
            f"PartitionName=two Nodes={','.join(NODES)} Default=YES State=UP",
            f"PartitionName=one Nodes={WHOLE_NODE} State=UP",
        ]

    def _path(self, name: str) -> str:
        return shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin:/sbin") or name

    def _is_idle(self) -> bool:
        command = ["sinfo", "--noheader", "--format=%D %T"]
        found = subprocess.run(
            command, env=self._environment, capture_output=True, text=True, timeout=30, check=False
        ).stdout.split("\n")
        return (
            sum(int(line.split()[0]) for line in found if line.endswith(" idle")) == len(NODES) + 1
        )

    def close(self) -> None:
        self._daemons.close()
