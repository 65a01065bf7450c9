"""docs/multi_node.md and configs/cluster: what can be known of them without any launcher."""

from __future__ import annotations

import re
import shlex
import subprocess

import pytest
from torch.distributed.run import get_args_parser

from tests.support import recipes as page
from tests.support.paths import ROOT

CLUSTER = ROOT / "configs" / "cluster"
SCRIPT = ["deepspeed-ext", "run", "examples/train.py", "--output", "/checkpoints/run"]


def test_every_recipe_is_bash_and_runs_an_example() -> None:
    recipes = page.recipes()
    assert len(recipes) > 3
    for recipe in recipes.values():
        assert "examples/" in recipe.command + "".join(recipe.files.values())
        subprocess.run(["bash", "-nc", recipe.command], check=True, timeout=30)


def test_every_command_of_the_page_has_a_marker() -> None:
    text = page.PAGE.read_text()
    assert len(re.findall(r"^```\w*$", text, re.MULTILINE)) == 2 * len(
        re.findall(r"^<!-- (?:recipe|file): ", text, re.M)
    )


@pytest.mark.parametrize("name", ["trainjob.yaml", "skypilot.yaml"])
def test_cluster_files_say_that_they_were_not_run(name: str) -> None:
    assert "NOT RUN" in (CLUSTER / name).read_text().splitlines()[0]


def test_the_trainjob_starts_the_script_by_torchrun() -> None:
    yaml = pytest.importorskip("yaml")
    job = yaml.safe_load((CLUSTER / "trainjob.yaml").read_text())
    assert (job["apiVersion"], job["kind"]) == ("trainer.kubeflow.org/v1alpha1", "TrainJob")
    trainer = job["spec"]["trainer"]
    program, *words = trainer["command"]
    options = get_args_parser().parse_args(words)
    assert program == "torchrun"
    assert [options.training_script, *options.training_script_args] == SCRIPT
    assert trainer["numProcPerNode"] == trainer["resourcesPerNode"]["limits"]["nvidia.com/gpu"]


def test_the_skypilot_task_starts_the_script_by_torchrun() -> None:
    yaml = pytest.importorskip("yaml")
    task = yaml.safe_load((CLUSTER / "skypilot.yaml").read_text())
    assert task["num_nodes"] == 2
    subprocess.run(["bash", "-nc", task["run"]], check=True, timeout=30)
    command = task["run"].replace('$(echo "$SKYPILOT_NODE_IPS" | head -n 1)', "node1")
    for name, value in {"NUM_NODES": "2", "NUM_GPUS_PER_NODE": "8", "NODE_RANK": "1"}.items():
        command = command.replace(f"$SKYPILOT_{name}", value)
    program, *words = shlex.split(command.replace("\\\n", " "), comments=True)
    options = get_args_parser().parse_args(words)
    assert program == "torchrun"
    assert [options.training_script, *options.training_script_args] == SCRIPT
    assert (options.master_addr, options.master_port, options.no_python) == ("node1", 29500, True)
