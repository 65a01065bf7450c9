"""ZenFlow's own settings and figures, step by step: schedules, overflows, variants, exact weights,
monitor, cores."""

import math
import os
import re
from typing import Any

import psutil
from deepspeed import comm as dist

from tests.support.models import batches, two_groups
from tests.support.paths import ROOT
from tests.support.ranks import run_ranks
from tests.support.zenflow import make_engine, train, zenflow_config


def measured_run(config: dict) -> dict[str, Any]:
    engine = make_engine(config, groups=two_groups)
    losses = train(engine, batches(30, dist.get_rank()))
    adam = engine.optimizer.host_optimizer
    adam.state.drain()
    found = {"losses": losses, "figures": engine.optimizer.measurements()}
    engine.destroy()
    return found


def test_a_run_trains_and_is_measured() -> None:
    found = run_ranks(1, measured_run, zenflow_config(2))[0]
    assert found["losses"][-1] < found["losses"][0]
    figures = found["figures"]
    # At this lr the rounding of W to bf16 is larger than a step. Dithering has the root of two of
    # its error, and the prediction may not add much to it.
    assert (
        0
        < figures["zenflow_prediction_error"]
        < math.sqrt(2.0) * figures["zenflow_rounding_error"] + 0.5
    )
    assert figures["zenflow_bytes_down"] > 0
    assert figures["zenflow_worker_ms"] > 0
    assert figures["zenflow_wait_ms"] >= 0
    pages = "".join(
        (ROOT / "docs" / f"{page}.md").read_text() for page in ("zenflow", "flattening")
    )
    tables = re.findall(r"^\| ((?:`(?:zenflow|startup|flatten)_\w+`,? ?)+)\|", pages, re.MULTILINE)
    in_tables = set(re.findall(r"`(\w+)`", "".join(tables)))
    assert set(figures) <= in_tables, "a metric without a meaning in the manual"


def monitored(config: dict, folder: str) -> None:
    engine = make_engine(
        {**config, "csv_monitor": {"enabled": True, "output_path": folder, "job_name": "job"}}
    )
    train(engine, batches(3, dist.get_rank()))
    engine.destroy()


def test_figures_go_to_the_monitor(tmp_path: Any) -> None:
    run_ranks(1, monitored, zenflow_config(2), str(tmp_path))
    rows = (tmp_path / "job" / "Train_zenflow_wait_ms.csv").read_text().splitlines()
    assert len(rows) == 1 + 3
    assert (tmp_path / "job" / "Train_zenflow_prediction_error.csv").exists()


def bound(config: dict) -> tuple[set, set, set, set]:
    before = os.sched_getaffinity(0)
    config["zero_optimization"]["core_binding"] = {"enabled": True}
    engine = make_engine(config)
    train(engine, batches(3, dist.get_rank()))
    plan = engine.core_binding.plan
    worker = psutil.Process(engine.optimizer.host_optimizer.link.process.pid).cpu_affinity()
    planned = set(plan.optimizer) if plan else before
    engine.destroy()
    return planned, set(worker), before, os.sched_getaffinity(0)


def test_worker_runs_where_the_core_plan_says() -> None:
    for planned, worker, before, after in run_ranks(2, bound, zenflow_config(2)):
        assert worker == planned
        assert after == before
