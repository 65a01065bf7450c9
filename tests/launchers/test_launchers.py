"""Each launcher continues the training of the one before, on its cores, and with the losses of an
undisturbed run."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import IO

import pytest

from deepspeed_ext.runtime.launcher_variables import first_host
from tests.launchers import page, training
from tests.launchers.cells import CELLS, EXTRA_LAUNCHERS, SLURM, Cell, installed
from tests.launchers.processes import adopt_orphans, descendants, end, free_ports, require_none_left
from tests.launchers.slurm import PrivateSlurm
from tests.launchers.ssh import NODES, PrivateSsh

CELL_SECONDS = 240.0
# the first also waits for the undisturbed run
pytestmark = pytest.mark.timeout(2 * CELL_SECONDS + 120)
RANKS_OF_OTHERS = ("SLURM_", "OMPI_", "PMI", "MPI_", "MASTER_", "TORCHELASTIC_", "ACCELERATE_")
RANK_VARIABLES = {
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "LOCAL_SIZE",
    "CROSS_RANK",
    "CROSS_SIZE",
}


OF_THE_NODES = ("DS_ACCELERATOR", "OMP_NUM_THREADS", "TORCH_EXTENSIONS_DIR")
"""Variables for training on the CPU that every node has, whatever a launcher passes on."""


def environment() -> dict[str, str]:
    """This process's, without what a launcher has put there, for training on the CPU."""
    kept = {
        n: v
        for n, v in os.environ.items()
        if not n.startswith(RANKS_OF_OTHERS) and n not in RANK_VARIABLES
    }
    return {
        **kept,
        "PATH": f"{Path(sys.executable).parent}:{kept['PATH']}:/usr/sbin:/sbin",
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    }


class Site:
    """Two nodes on this machine: daemons that start when a launcher first needs them, and one
    training."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.training = training.Training(
            folder / "training", steps=training.STEPS_EACH * len(CELLS)
        )
        self.environment = {**environment(), "RAY_TMPDIR": str(folder / "ray")}
        self._running: dict[str, PrivateSsh | PrivateSlurm] = {}
        self._reference: list[float] = []

    def close(self) -> None:
        for daemons in self._running.values():
            daemons.close()

    def start(self, name: str) -> None:
        if name in self._running:
            return
        folder = self.folder / name
        folder.mkdir()
        if name == "ssh":
            ssh = self._running[name] = PrivateSsh(
                folder, {n: v for n, v in self.environment.items() if n in OF_THE_NODES}
            )
            self.environment["PATH"] = f"{ssh.bin}:{self.environment['PATH']}"
        else:
            slurm = self._running[name] = PrivateSlurm(folder, self.environment)
            self.environment["SLURM_CONF"] = str(slurm.config)

    def undisturbed(self) -> list[float]:
        """The losses of one run from the first step to the last, started by hand."""
        if not self._reference:
            output = self.folder / "undisturbed"
            arguments = self.training.arguments(output, self.training.steps).replace(
                " --resume", ""
            )
            by_hand = (
                f"WORLD_SIZE=2 LOCAL_RANK=0 MASTER_ADDR=127.0.0.1 MASTER_PORT={free_ports(1)[0]}"
            )
            command = (
                f"RANK=$NODE_RANK {by_hand} deepspeed-ext run "
                f"{self.training.script('train.py')} {arguments}"
            )
            self.run(page.Recipe("by hand", command, on_each_node=True), self.folder)
            self._reference = training.losses(output)
        return self._reference

    def run(self, recipe: page.Recipe, folder: Path) -> None:
        """Run a recipe in `folder`; an AssertionError with what it has printed unless it
        succeeds."""
        for name, content in recipe.files.items():
            (folder / name).write_text(content)
        before = descendants()
        log = folder / "output.txt"
        nodes = range(len(NODES) if recipe.on_each_node else 1)
        try:
            with log.open("ab") as out:
                started = [self._start(recipe.command, folder, node, out) for node in nodes]
                statuses = self._wait(started)
            said = log.read_text(errors="replace")[-8000:]
            assert not any(statuses), f"{recipe.command}\nended with {statuses}:\n{said}"
            require_none_left(before)
        finally:
            end(descendants() - before)

    def _start(
        self, command: str, folder: Path, node: int, out: IO[bytes]
    ) -> subprocess.Popen[bytes]:
        environment = {**self.environment, "NODE_RANK": str(node)}
        return subprocess.Popen(
            ["bash", "-euc", command],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
        )

    @staticmethod
    def _wait(processes: list[subprocess.Popen[bytes]]) -> list[int | str]:
        """The exit status of each, or why there is none."""
        deadline = time.monotonic() + CELL_SECONDS
        while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
            if any(process.poll() for process in processes):
                deadline = min(deadline, time.monotonic() + 20.0)  # the others may now wait for it
            time.sleep(0.2)
        return [
            "no end" if process.returncode is None else process.returncode for process in processes
        ]


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    adopt_orphans()
    # else a limit on time would leave the daemons
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with ExitStack() as stack:
        # Sockets of Slurm and MPI lie below, and their paths may have no more than 108 characters.
        folder = Path(
            stack.enter_context(tempfile.TemporaryDirectory(prefix="launch-", dir="/tmp"))
        )
        before = descendants()
        stack.callback(lambda: end(descendants() - before))
        site = Site(folder)
        stack.callback(site.close)
        yield site


def test_launchers_beside_torchrun_are_installed() -> None:
    """No launcher, no matrix: that all of it is skipped must not look like success."""
    found = [cell.name for cell in CELLS if not cell.missing() and cell.name != "torchrun"]
    assert found, (
        f"none of {', '.join(EXTRA_LAUNCHERS)} is installed: run tools/install_launchers.sh"
    )


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.name)
def test_a_recipe_trains_with_its_launcher(cell: Cell, site: Site, tmp_path: Path) -> None:
    if missing := cell.missing():
        pytest.skip(missing)
    for name in cell.daemons:
        site.start(name)
    expected = site.undisturbed()
    until = site.training.done + training.STEPS_EACH
    output = tmp_path / "run"
    site.training.copy(output)
    site.run(substituted(cell, site, Path(output.name), until), tmp_path)

    assert training.losses(output) == expected[:until]
    assert training.saved_ranks(output, until) == set(range(training.RANKS))
    logs = site.training.logs()
    check_plan(training.planned_cpus(logs), cell)
    assert "outside the plan" not in logs
    site.training.accept(output)


def substituted(cell: Cell, site: Site, output: Path, until: int) -> page.Recipe:
    """The recipe of the page, as the page says that it is changed, and as the cell does.

    Args:
        output: relative to the folder where the recipe is typed.
    """
    arguments = site.training.arguments(output, until)
    scripts = {
        f"examples/{n}": f"{site.training.script(n)} {arguments}"
        for n in ("train.py", "ray_train.py")
    }
    ports = dict(zip(("29400", "29500"), map(str, free_ports(2)), strict=True))
    hosts = dict(zip(("node1", "node2"), NODES, strict=True))
    recipe = page.recipes()[cell.recipe]
    changed = recipe.with_replaced(cell.changes)
    assert bool(cell.changes) == (changed != recipe), f"the recipe has none of {list(cell.changes)}"
    return changed.with_replaced({**hosts, **ports, **scripts})


def check_plan(plan: list[frozenset[int]], cell: Cell) -> None:
    """Both ranks share this machine, so their cores must differ, and stay within what the launcher
    gave."""
    assert len(plan) == training.RANKS, plan
    assert all(plan)
    if (os.cpu_count() or 1) >= training.RANKS:
        assert not plan[0] & plan[1]
    if cell.confines is not None:
        orders = [cell.confines, cell.confines[::-1]] if cell.in_any_order else [cell.confines]
        assert any(plan[0] <= first and plan[1] <= second for first, second in orders)


@pytest.mark.parametrize(
    "hostlist", ["node[01-03,7]", "a[5,1],b", "rack[2-3]node[010-12]", "127.0.0.[2-3]", "one"]
)
def test_the_first_host_is_that_of_scontrol(hostlist: str, site: Site) -> None:
    if not all(installed(name) for name in (*SLURM, "scontrol")):
        pytest.skip("not installed: Slurm (tools/install_launchers.sh)")
    site.start("slurm")
    command = [str(shutil.which("scontrol")), "show", "hostnames", hostlist]
    names = subprocess.run(
        command, env=site.environment, capture_output=True, text=True, timeout=30, check=True
    ).stdout.split()
    assert first_host(hostlist) == names[0]
