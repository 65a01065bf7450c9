"""Every code block of README and docs is executed, or stands in NOT_RUN with the reason."""

from __future__ import annotations

import ast
import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from deepspeed_ext.commands.memory.setup import config_of, ways
from deepspeed_ext.config import CoreBindingConfig, ZenFlowConfig, ZeroFields
from tests.support import pages
from tests.support.page_bodies import (
    refusal_without_extension,
    refusals_without_extension,
    run_page,
)
from tests.support.pages import Block
from tests.support.paths import ROOT
from tests.support.ranks import run_ranks
from tools import architecture, architecture_picture

pytestmark = pytest.mark.cpu(reason='Accelerate chooses the device by itself, and knows no "sim"')

RECORDS = ("docs/design/", "docs/results/")
"""Folders whose pages hold the commands of the commits that they measured."""
NOT_RUN = {
    (
        "docs/getting_started.md",
        "export DSEXT_AUTOLOAD=1",
    ): "tests/unit/test_autoload.py runs processes with it",
    (
        "docs/trainers.md",
        "from accelerate import Accelerator",
    ): "tests/unit/zenflow/test_accelerate.py runs it",
}
"""Page and begin of the first line -> why nothing executes the block."""

SYSTEMS = ("flattening", "single_param_gather", "zenflow", "core_binding")
SECTIONS = [
    "What it does",
    "When to use it",
    "When not to use it",
    "Cost",
    "Fields",
    "Troubleshooting",
]
BLOCKS = [
    block for block in pages.blocks() if not block.is_recipe and not block.page.startswith(RECORDS)
]


def reason_not_run(block: Block) -> str | None:
    found = [
        why
        for (page, begin), why in NOT_RUN.items()
        if page == block.page and block.text.startswith(begin)
    ]
    return found[0] if found else None


def test_every_block_is_right() -> None:
    """Configs are read by DeepSpeed, outputs are reproduced; of commands, program, target and
    arguments are checked."""
    chosen = [
        block for block in BLOCKS if block.language != "python" and reason_not_run(block) is None
    ]
    assert len(chosen) > 40
    (found,) = run_ranks(1, pages.failures, chosen, pool="pages")
    assert not found, "\n".join(found)


RUN_PYTHON = [
    block for block in BLOCKS if block.language == "python" and reason_not_run(block) is None
]
PYTHON_PAGES = {
    block.page: [other.text for other in RUN_PYTHON if other.page == block.page]
    for block in RUN_PYTHON
}


@pytest.mark.parametrize("page", PYTHON_PAGES)
def test_python_of_a_page_trains_on_two_ranks(page: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    first, second = run_ranks(2, run_page, page, PYTHON_PAGES[page], str(tmp_path), pool="pages")
    assert first == second
    assert first or not any("initialize(" in text for text in PYTHON_PAGES[page])


def test_the_config_to_copy_is_that_of_the_recipes() -> None:
    texts = [each.text for each in BLOCKS if each.page == "docs/trainers.md"]
    assert (ROOT / "configs" / "trainer_zenflow.json").read_text() in texts


def test_rows_of_not_run_are_needed() -> None:
    used = {
        (block.page, begin)
        for block in BLOCKS
        for page, begin in NOT_RUN
        if block.text.startswith(begin)
    }
    assert used == set(NOT_RUN)


@pytest.mark.parametrize(
    ("language", "text", "says"),
    [
        ("bash", "make tset", "no target tset"),
        ("bash", "make test PROCESES=3", "does not read PROCESES"),
        ("bash", "make train ARGS='--stpes 3'", "--stpes"),
        ("bash", "python -m tests.perf.bench_gather --ranks two", "--ranks"),
        ("bash", "python -m tests.perf.bench_convergence --seeds 2 --onyl", "--onyl"),
        ("bash", "python -m tests.perf.none", "there is no tests/perf/none.py"),
        (
            "bash",
            "python -m pytest -q tests/unit/test_none.py",
            "there is no tests/unit/test_none.py",
        ),
        ("bash", "python -m pytest --simulatd tests/shape", "no option --simulatd"),
        ("bash", "deepspeed-ext paln", "paln"),
        ("bash", "deepspeed --num_gpsu 8 x.py", "ended with|num_gpsu"),
        ("bash", "deepspeed --num_gpus 8 --no_python deepspeed-ext rnu x.py", "rnu"),
        ("bash", "torchrun --nproc-per-nodes 2 x.py", "nproc-per-nodes"),
        ("bash", "pip install '.[transformer]'", "extras"),
        ("bash", "slurm-run x", "no rule for the program"),
        (
            "console",
            "$ deepspeed-ext plan --memory --params 7e9 --ranks 8\n7 parameters",
            "prints something else",
        ),
        ("json", '"zero_optimization": {"stage": 2, "flaten_tier": "host"}', "flaten_tier"),
        ("json", '{"stage": 2}', "expected zero_optimization"),
        ("diff", '-"zenflow": {}\n+"zenflow": {"intervall": 2}', "intervall"),
        ("", "anything", "no rule for language"),
        ("rust", "fn main() {}", "no rule for language"),
    ],
)
def test_a_wrong_block_is_found(language: str, text: str, says: str) -> None:
    (found,) = run_ranks(
        1, pages.failures, [Block("page.md", 1, language, text, False)], pool="pages"
    )
    assert len(found) == 1, found
    assert re.search(says, found[0])


@pytest.mark.parametrize("name", SYSTEMS)
def test_pages_of_systems_have_the_same_sections(name: str) -> None:
    text = (ROOT / "docs" / f"{name}.md").read_text()
    titles = re.findall(r"^## (.+)$", text, re.MULTILINE)
    assert titles[: len(SECTIONS)] == SECTIONS


def test_fields_of_systems_are_those_of_the_config() -> None:
    def fields_of(name: str) -> list[str]:
        section = (
            (ROOT / "docs" / f"{name}.md").read_text().split("\n## Fields\n")[1].split("\n## ")[0]
        )
        return re.findall(
            r"(?<=`)(?!zero_optimization)\w+(?=`)", re.sub(r"\(\[?.*?\)", "", section)
        )

    def names(model: type[BaseModel]) -> list[str]:
        return list(model.model_fields)

    of_sections = {"zenflow", "core_binding"}
    flat = [*fields_of("flattening"), *fields_of("single_param_gather")]
    assert sorted(flat) == sorted(set(names(ZeroFields)) - of_sections)
    # not a user's
    assert sorted(fields_of("zenflow")) == sorted(set(names(ZenFlowConfig)) - {"steps_per_epoch"})
    shared = {"pt_reserved_cores", "pt_reserved_cores_perc"}
    assert sorted(fields_of("core_binding")) == sorted(
        {*names(CoreBindingConfig), *shared, *of_sections}
    )


def messages_of_the_package() -> str:
    """All texts of the package's sources, one a line, with {} for what is filled in."""
    found = []
    for path in (ROOT / "deepspeed_ext").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                found.append(
                    "".join(
                        str(part.value) if isinstance(part, ast.Constant) else "{}"
                        for part in node.values
                    )
                )
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return "\n".join(found)


OF_OTHERS = {"Zenflow must be used with cpu offload", "Extra inputs are not permitted"}
"""Quoted messages of DeepSpeed and pydantic, which those see who have not enabled the extension."""


def test_messages_that_pages_quote_are_those_of_the_package() -> None:
    messages = messages_of_the_package()
    sections = [
        (ROOT / f"docs/{name}.md").read_text().split("\n## Troubleshooting\n")[1].split("\n## ")[0]
        for name in SYSTEMS
    ]
    quotes = pages.quoted("\n".join([(ROOT / "docs/troubleshooting.md").read_text(), *sections]))
    assert len(quotes) > 40
    assert {quote for quote in quotes if quote not in messages} == OF_OTHERS


def test_messages_of_others_are_those_that_a_run_without_the_extension_gets() -> None:
    sections = ({"stage": 2, "zenflow": {}}, {"stage": 2, "flatten_tier": "host"})
    for section, message in zip(sections, sorted(OF_OTHERS, reverse=True), strict=True):
        (found,) = run_ranks(1, refusal_without_extension, section, pool="pages")
        assert message in found


DEEPSPEEDS_OWN = {
    (
        "docs/migrating_from_deepspeed_zenflow.md",
        "topk_ratio",
    ): "the config of DeepSpeed's ZenFlow that is replaced",
    ("docs/drop_in.md", "overlap_step"): "says what a test adds to configs of DeepSpeed's tests",
}
"""Page and a field of a section that stock DeepSpeed may accept -> why."""


def zenflow_sections() -> list[tuple[str, dict[str, Any]]]:
    """Every ``zenflow`` section that users may copy, with where it stands: pages, ready configs,
    examples, and what ``plan --memory --write`` writes."""
    paths = [*pages.PAGES, *(ROOT / "configs").glob("*.json"), *(ROOT / "examples").glob("*.py")]
    found = []
    for path in paths:
        where = str(path.relative_to(ROOT))
        if not where.startswith(RECORDS) and path.name != "schema.json":
            found += [
                (where, section) for section in pages.objects_after('"zenflow":', path.read_text())
            ]
    written = [
        config_of(setup, "bfloat16", reader)
        for setup in ways()
        for reader in ("script", "trainer")
        if setup.zenflow
    ]
    return found + [("--write", config["zero_optimization"]["zenflow"]) for config in written]


def test_stock_deepspeed_refuses_every_zenflow_section_of_ours() -> None:
    """Else a run in which the extension is off would train with DeepSpeed's own ZenFlow, without an
    error."""
    found, used = zenflow_sections(), set()
    assert len(found) > 70
    places = {where for where, _ in found}
    assert {
        "README.md",
        "configs/zenflow.json",
        "docs/zenflow.md",
        "examples/lightning_trainer.py",
    } <= places
    sections = list({json.dumps(section): section for _, section in found}.values())
    (said,) = run_ranks(1, refusals_without_extension, sections, pool="pages")
    refused = {json.dumps(section): text for section, text in zip(sections, said, strict=True)}
    for where, section in found:
        known = {
            key
            for key in DEEPSPEEDS_OWN
            if key[0] == where and key[1] in section and "update_rule" not in section
        }
        used |= known
        text = refused[json.dumps(section)]
        assert (text == "no error") if known else ("Extra inputs are not permitted" in text), (
            where,
            section,
        )
    assert used == set(DEEPSPEEDS_OWN)


def test_ready_configs_and_snippets_of_stage_3_save_a_model_that_loads() -> None:
    """A trainer that saves at stage 3 without this field writes no weights."""
    field = "stage3_gather_16bit_weights_on_model_save"
    texts = [
        *(ROOT / "configs").glob("*.json"),
        *(path for path in pages.PAGES if not str(path.relative_to(ROOT)).startswith(RECORDS)),
    ]
    zero = [
        each
        for path in texts
        for each in pages.objects_after('"zero_optimization":', path.read_text())
    ]
    at_3 = [section for section in zero if section.get("stage") == 3]
    assert len(at_3) >= 5
    assert [section for section in at_3 if section.get(field) is not True] == []


def test_help_of_the_makefile_lists_few_commands_first() -> None:
    done = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True)
    first, others = done.stdout.split("\nFor more:\n")
    assert re.findall(r"^  make ([a-z-]+) ", first, re.MULTILINE) == [
        "train",
        "test",
        "check",
        "bench",
        "docs-site",
    ]
    targets = set(re.findall(r"^([a-z-]+):.*## ", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"^  make ([a-z-]+) ", first + others, re.MULTILINE)) == targets


def test_the_picture_of_the_architecture_is_current_and_names_real_folders() -> None:
    assert architecture_picture.PICTURE.read_text() == architecture_picture.picture(), (
        "run `make docs`"
    )
    assert {folder for box in architecture_picture.BOXES for folder in box.folders} <= set(
        architecture.folders()
    )
