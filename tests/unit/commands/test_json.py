"""``--json`` prints JSON and nothing else, also where DeepSpeed logs which accelerator it has
found."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.support.paths import ROOT

CODE = """
import sys, types
from deepspeed_ext.commands import main as cli

class Late(types.ModuleType):
    def __getattr__(self, name):
        if name != "run_from_cli":
            raise AttributeError(name)
        # this is where DeepSpeed's logger takes the stdout that it finds
        import deepspeed_ext.adapter.upstream
        return lambda arguments: {answer}

sys.modules["{module}"] = Late("{module}")
sys.exit(cli.main({arguments}))
"""


@pytest.mark.cpu(reason="DeepSpeed logs its choice where it finds no accelerator")
def test_json_is_all_that_is_printed() -> None:
    """The command's work is put aside."""
    module, answer = "deepspeed_ext.commands.verify", ("{}", True)
    code = CODE.format(module=module, arguments=["verify", "--config", "a"], answer=answer)
    environment = {key: value for key, value in os.environ.items() if key != "DS_ACCELERATOR"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "{}\n"), done.stderr
    assert "accelerator" in done.stderr
