"""``deepspeed-ext run``: an unchanged script, with the extension on."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

SCRIPT = """
import sys
from deepspeed_ext.affinity import snapshot
import neighbour
import deepspeed
print(__name__, sys.argv[1:], neighbour.VALUE, deepspeed.DeepSpeedEngine.__module__, snapshot.initial() is not None)
sys.exit(3)
"""


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "deepspeed_ext.cli", "run", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_a_script_runs_as_main_with_its_arguments_and_the_extension(tmp_path: Path) -> None:
    (tmp_path / "neighbour.py").write_text("VALUE = 7\n")
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    done = run(str(script), "--json", "--lr", "1e-3", "file")
    expected = "__main__ ['--json', '--lr', '1e-3', 'file'] 7 deepspeed_ext.engine True"
    assert done.stdout.splitlines()[-1] == expected
    assert done.returncode == 3


def test_an_error_of_the_script_keeps_its_traceback(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("raise ValueError('mine')\n")
    done = run(str(script))
    assert done.returncode == 1
    assert "Traceback" in done.stderr
    assert "ValueError: mine" in done.stderr


def test_a_missing_script_is_bad_input(tmp_path: Path) -> None:
    done = run(str(tmp_path / "none.py"))
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
