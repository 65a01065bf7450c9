"""``deepspeed-ext run``: an unchanged script, with the extension on."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from deepspeed_ext.commands import main as cli
from deepspeed_ext.runtime.launch import NEEDED
from tests.support.forked import run_forked
from tests.support.paths import ROOT

SCRIPT = """
import atexit, pickle, sys
from deepspeed_ext.cores import initial_mask
import neighbour
import deepspeed
engine = deepspeed.DeepSpeedEngine.__module__
class Result:
    "Something that is saved at exit."
print(__name__, sys.argv[1:], neighbour.VALUE, engine, initial_mask() is not None)
atexit.register(lambda: print(len(pickle.dumps(Result())) > 0))
"""


def forked(script: Path, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """``deepspeed-ext run script`` without a start of Python."""
    return run_forked("deepspeed_ext.commands.main", "run", str(script), environment=environment)


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "deepspeed_ext.commands.main", "run", *arguments]
    variables = {**os.environ, **environment}
    return subprocess.run(
        command, cwd=ROOT, env=variables, capture_output=True, text=True, check=False
    )


def test_a_script_runs_as_main_with_its_arguments_and_the_extension(tmp_path: Path) -> None:
    """Through a link; as Python does, its neighbours are those of the script itself."""
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts/neighbour.py").write_text("VALUE = 7\n")
    (tmp_path / "scripts/real.py").write_text(SCRIPT)
    script = tmp_path / "train.py"
    script.symlink_to(tmp_path / "scripts/real.py")
    done = run(str(script), "--", "--json", "--lr", "1e-3", "file")
    given = ["--", "--json", "--lr", "1e-3", "file"]
    expected = f"__main__ {given} 7 deepspeed_ext.adapter.engine True"
    assert done.stdout.splitlines()[-2:] == [expected, "True"], done.stderr


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python has safe paths from 3.11 on")
def test_with_safe_paths_the_first_of_the_users_paths_stays(tmp_path: Path) -> None:
    """As with ``python SCRIPT``, whose folder is then not searched either."""
    (tmp_path / "first").mkdir()
    (tmp_path / "first/wanted.py").write_text("")
    script = tmp_path / "train.py"
    script.write_text("import sys, wanted\nprint(sys.path[0])\n")
    paths = os.pathsep.join([str(tmp_path / "first"), str(ROOT)])
    done = run(str(script), PYTHONPATH=paths, PYTHONSAFEPATH="1")
    assert done.stdout.splitlines()[-1:] == [str(tmp_path / "first")], done.stderr


@pytest.mark.parametrize(
    "name", ["none.py", "n" * 300, "x" * 5000, "fifo", ".", "loop", "null\0byte"]
)
def test_what_is_no_script_is_bad_input(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    os.mkfifo("fifo")
    os.symlink("loop", "loop")
    assert cli.main(["run", name]) == 2
    assert capsys.readouterr().err.count("\n") == 1


LONE = """
import os
import deepspeed
deepspeed.init_distributed(dist_backend="gloo")
names = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR"]
print(*map(os.environ.get, names), deepspeed.comm.get_world_size())
"""


def without_ranks() -> dict[str, str]:
    """The variables of a shell in which no launcher runs."""
    return {name: value for name, value in os.environ.items() if name not in NEEDED}


@pytest.mark.sampled(2)
@pytest.mark.skipif(importlib.util.find_spec("mpi4py") is not None, reason="DeepSpeed asks MPI")
@pytest.mark.parametrize("autoload", [False, True])
def test_a_process_without_a_launcher_is_rank_0_of_1(autoload: bool, tmp_path: Path) -> None:
    """And without MPI: under ``run``, and as plain ``python train.py`` with the extension on."""
    script = tmp_path / "train.py"
    script.write_text(LONE)
    plain = [sys.executable, str(script)]
    started = (
        plain
        if autoload
        else [sys.executable, "-m", "deepspeed_ext.commands.main", "run", str(script)]
    )
    variables = without_ranks() | ({"DSEXT_AUTOLOAD": "1"} if autoload else {})
    done = subprocess.run(
        started, cwd=ROOT, env=variables, capture_output=True, text=True, check=False
    )
    assert done.stdout.splitlines()[-1:] == ["0 1 0 1 127.0.0.1 1"], done.stderr[-2000:]
    assert "so it is rank 0 of 1" in done.stderr


def test_ranks_are_not_in_the_environment_before_communication_begins(tmp_path: Path) -> None:
    """A launcher inside of the script, such as Lightning's, would take them for those of its
    processes."""
    script = tmp_path / "train.py"
    script.write_text(
        "import os, deepspeed\nprint(os.environ.get('LOCAL_RANK'), os.environ.get('WORLD_SIZE'))\n"
    )
    done = forked(script, without_ranks())
    assert done.stdout.splitlines()[-1:] == ["None None"], done.stderr[-2000:]


def test_a_task_of_srun_gets_the_variables_of_deepspeed(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import os\nprint(*map(os.environ.get, ['RANK', 'WORLD_SIZE', 'LOCAL_RANK', "
        "'MASTER_ADDR']))\n"
    )
    task = {"SLURM_PROCID": "1", "SLURM_LOCALID": "0", "SLURM_NODEID": "1", "SLURM_JOB_ID": "7"}
    step = {"NUM_TASKS": "2", "TASKS_PER_NODE": "1(x2)", "NODELIST": "node[1-2]"}
    slurm = {**task, **{f"SLURM_STEP_{name}": value for name, value in step.items()}}
    environment = {**os.environ, **slurm}
    assert forked(script, environment).stdout.splitlines()[-1:] == ["1 2 0 node1"]
    refused = forked(script, environment | {"WORLD_SIZE": "3"})
    assert refused.returncode == 2
    assert refused.stderr.startswith(
        "deepspeed-ext run: error: WORLD_SIZE=3 is set, but srun says 2"
    )
