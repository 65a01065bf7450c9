"""``deepspeed-ext verify``: trains a small model with a user's config on real ranks, compares it
with plain training, resumes it, and kills an optimizer process. `verify_rank` is what a rank does.

This process makes the config of the check from the user's, starts the ranks, limits their time and
reports. Each rank writes its verdicts to a file. The kernel ends a rank with this process, and an
optimizer process with its rank.
"""

import json
import os
import re
import subprocess
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from deepspeed_ext.config.file import count_in, read_json, section_of
from deepspeed_ext.errors import ConfigError
from deepspeed_ext.runtime.log import counted, logger
from deepspeed_ext.runtime.process import python_command

__all__ = ["CHECKS", "PLAN", "REFUSED", "Report", "checked_config", "run_from_cli", "verify"]

CHECKS, REFUSED = ("training", "resume", "worker's death"), "config"
"""Names of verdicts; the last one is there only if DeepSpeed or this package refuses the config."""
PLAN = "plan.json"
"""File with the config of the check and its number of steps, in the folder of the check."""
GRACE_SECONDS = 60.0
"""Time for all ranks to end after one has failed or an optimizer process was killed."""
STEPS, WARM_UP, MOST_BATCH = 8, 2, 8
LEFT_OUT = (
    "tensorboard wandb csv_monitor comet flops_profiler comms_logger autotuning elasticity nebula "
    "curriculum_learning data_efficiency compression_training eigenvalue progressive_layer_drop "
    "tensor_parallel sequence_parallel_size pipeline load_universal train_batch_size"
)
"""Fields that write outside the check's folder, or are about the user's data, model and cluster."""
ADAMW = {"lr": 5e-5, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.0}
SCHEDULE = {"warmup_min_lr": 0.0, "warmup_max_lr": 5e-5, "warmup_num_steps": 0}
AUTO: dict[str, Any] = {**ADAMW, **SCHEDULE, "total_num_steps": 1000, "bf16.enabled": True}
"""What the Hugging Face Trainer fills in for "auto"; other fields get DeepSpeed's default."""


class Report(NamedTuple):
    """The result of a check: status (PASS, FAIL or SKIPPED) and detail by the name of the check."""

    ranks: int
    steps: int
    changes: list[str]
    checks: dict[str, tuple[str, str]]
    warnings: list[str]
    output: str

    @property
    def passed(self) -> bool:
        """Whether no check failed."""
        return all(status != "FAIL" for status, _ in self.checks.values())

    def as_text(self) -> str:
        """Differences from the config, a line per check, warnings, and a failed rank's output."""
        failed = sum(status == "FAIL" for status, _ in self.checks.values())
        end = f"{failed} of {len(self.checks)} checks failed" if failed else "nothing failed"
        lines = [
            f"{counted(self.ranks, 'rank')}, {counted(self.steps, 'step')}",
            *(f"  changed for the check: {change}" for change in self.changes),
            *(f"{status:<7}  {name:<14}  {how}" for name, (status, how) in self.checks.items()),
            *(f"warning: {warning}" for warning in self.warnings),
            *(f"  | {line}" for line in self.output.splitlines()),
            f"{end}, {counted(len(self.warnings), 'warning')}" if self.warnings else end,
        ]
        return "\n".join(lines)


def run_from_cli(arguments: Namespace) -> tuple[str, bool]:
    """The report for the parsed arguments, and whether nothing failed.

    Raises:
        ConfigError: the config cannot be read, or DeepSpeed refuses it.
    """
    from deepspeed_ext.runtime.backend import get_accelerator

    config, count = read_json(arguments.config), 0
    if get_accelerator().device_name() != "cpu":
        count = get_accelerator().device_count()
    if 0 < count < (arguments.ranks or 0):
        has = f"this machine has {counted(count, 'accelerator')}, and each rank needs one"
        raise ConfigError(f"--ranks {arguments.ranks}: {has}")
    report = verify(config, arguments.ranks or count or 2, arguments.steps, arguments.timeout)
    if arguments.json:
        rows = {"config": arguments.config, "passed": report.passed, **report._asdict()}
        return json.dumps(rows, indent=2), report.passed
    return f"{arguments.config}: {report.as_text()}", report.passed


def checked_config(
    user: Mapping[str, Any], steps: int | None
) -> tuple[dict[str, Any], int, list[str]]:
    """The config of a check, its number of steps, and the differences from the user's config.

    Args:
        steps: the user's choice; None: as many as the config needs.
    """
    changes: list[str] = []
    config = _filled(user, "", changes) | {"steps_per_print": 10**9}
    if not {"train_batch_size", "train_micro_batch_size_per_gpu"} & set(user):
        needs = "train_batch_size or train_micro_batch_size_per_gpu"
        raise ConfigError(f"set {needs}: DeepSpeed needs one")
    sizes = {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 1}
    for name, default in sizes.items():
        config[name] = min(count_in(user, name) or default, MOST_BATCH)
        if config[name] != user.get(name):
            changes.append(f"{name}: {config[name]}")
    zero, needed = section_of(config, "zero_optimization"), STEPS
    if not section_of(config, "optimizer"):
        # torch's, as the Trainer passes it; under offload Accelerate makes it DeepSpeed's CPU Adam
        is_offloaded = section_of(zero, "offload_optimizer").get("device", "none") != "none"
        params = {**ADAMW, "torch_adam": not is_offloaded}
        config["optimizer"] = {"type": "AdamW", "params": params}
        changes.append(f"the config has no optimizer: AdamW with lr {ADAMW['lr']}")
    elif not isinstance(config["optimizer"].get("type"), str):
        raise ConfigError("optimizer.type: expected a name, such as AdamW, got none")
    if (zenflow := section_of(zero, "zenflow")) or zero.get("zenflow") == {}:
        warm_up = zenflow.get("full_warm_up_rounds", WARM_UP + 1)
        if isinstance(warm_up, int) and warm_up > WARM_UP:
            zenflow["full_warm_up_rounds"] = WARM_UP
            changes.append(f"zenflow.full_warm_up_rounds: {WARM_UP}")
        if isinstance(interval := zenflow.get("update_interval"), int):
            needed += 4 * (interval - 1)
    return config, steps or needed, changes


def _filled(section: Mapping[str, Any], where: str, changes: list[str]) -> dict[str, Any]:
    """A copy of a section without fields that are left out, and with a value for each "auto"."""
    filled: dict[str, Any] = {}
    for name, value in section.items():
        if name in LEFT_OUT.split():
            changes.append(f"{where}{name} is left out")
        elif isinstance(value, Mapping):
            filled[name] = _filled(value, f"{where}{name}.", changes)
        elif value != "auto":
            filled[name] = value
        elif (key := name if name in AUTO else f"{where}{name}") in AUTO:
            filled[name] = AUTO[key]
            changes.append(f"{where}{name}: {AUTO[key]} in place of auto")
        else:
            changes.append(f"{where}{name}: DeepSpeed's default in place of auto")
    return filled


def start_rank(folder: Path, environment: dict[str, str], log: BinaryIO) -> Any:
    """Start a rank with `log` as its output."""
    command = python_command("deepspeed_ext.commands.verify_rank", str(folder), str(os.getpid()))
    streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
    return subprocess.Popen(command, env=environment, start_new_session=True, **streams)


def verify(
    user: Mapping[str, Any],
    ranks: int,
    steps: int | None = None,
    limit_seconds: float = 600.0,
    start: Callable[[Path, dict[str, str], BinaryIO], Any] = start_rank,
) -> Report:
    """Check a config.

    Args:
        steps: optimizer steps; None: enough for the config.
        start: starts a rank; see `start_rank`.

    Raises:
        ConfigError: DeepSpeed or this package refuses the config.
    """
    with tempfile.TemporaryDirectory("", "dsext-verify-", ignore_cleanup_errors=True) as name:
        folder, processes = Path(name), list[Any]()
        config, steps, changes = checked_config(user, steps)
        (folder / PLAN).write_text(json.dumps([config, steps]))
        try:
            for rank in range(ranks):
                with (folder / f"{rank}.log").open("wb") as log:
                    processes.append(start(folder, _environment(rank, ranks), log))
            logger.info(f"verify: {counted(ranks, 'rank')}, {counted(steps, 'step')}")
            why = _wait(folder, processes, limit_seconds)
            statuses = [process.poll() for process in processes]
        finally:
            for process in processes:
                process.kill()
            for process in processes:
                process.wait(GRACE_SECONDS)
        checks = _merged(folder, statuses, why)
        logs = [(folder / f"{rank}.log").read_text(errors="replace") for rank in range(ranks)]
    warnings = re.findall(r"\[WARNING\] \[deepspeed_ext\] (.*)", "\n".join(logs))
    report = Report(ranks, steps, changes, checks, list(dict.fromkeys(warnings)), "")
    rank = next((rank for rank, status in enumerate(statuses) if status != 0), 0)
    output = f"output of rank {rank}:\n{logs[rank][-2000:].strip()}"
    return report if report.passed else report._replace(output=output)


def _environment(rank: int, ranks: int) -> dict[str, str]:
    given = {k: v for k, v in os.environ.items() if k not in ("MASTER_ADDR", "MASTER_PORT")}
    given |= dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank))
    given |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE", "LOCAL_SIZE"), str(ranks))
    given.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // ranks)))
    return given | {"DSEXT_LOG_LEVEL": "INFO"}


def _verdicts(folder: Path, rank: int) -> dict[str, tuple[str, str]]:
    """What a rank has written so far, by the name of the check."""
    path = folder / f"{rank}.json"
    return json.loads(path.read_text()) if path.exists() else {}


def _wait(folder: Path, processes: list[Any], limit_seconds: float) -> str:
    """Wait until all ranks have ended; return why they have not."""
    deadline, why = time.monotonic() + limit_seconds, f"in {limit_seconds:.0f} s"
    while None in (statuses := [process.poll() for process in processes]):
        grace = time.monotonic() + GRACE_SECONDS
        is_last = len(_verdicts(folder, 0)) >= len(CHECKS) - 1
        if (any(statuses) or is_last) and grace < deadline:
            what = "one of them failed" if any(statuses) else "an optimizer process was killed"
            deadline, why = grace, f"in {GRACE_SECONDS:.0f} s after {what}"
        if time.monotonic() > deadline:
            return f"not all ranks ended {why}"
        time.sleep(0.05)
    return ""


def _merged(folder: Path, statuses: list[int | None], why: str) -> dict[str, tuple[str, str]]:
    """Merge the ranks' verdicts: a check has passed if it has on every rank.

    Args:
        why: what is wrong with how the processes ended; empty: nothing.

    Raises:
        ConfigError: a rank refused the config.
    """
    results = [_verdicts(folder, rank) for rank in range(len(statuses))]
    if refused := [result[REFUSED][1] for result in results if REFUSED in result]:
        raise ConfigError(f"this config cannot train: {refused[0]}")
    ended = "FAIL", why or f"the ranks ended with the statuses {statuses}"
    checks: dict[str, tuple[str, str]] = {}
    for name in CHECKS:
        verdicts = [result.get(name, ended) for result in results]
        is_over = any(status == "FAIL" for status, _ in checks.values())
        if is_over and not all(name in result for result in results):
            verdicts = [("SKIPPED", "the run stopped before")]
        checks[name] = next((each for each in verdicts if each[0] == "FAIL"), min(verdicts))
    # after an optimizer process's death, any status may occur
    badly = why or (any(statuses) and checks[CHECKS[-1]][0] == "SKIPPED")
    if badly and all(status != "FAIL" for status, _ in checks.values()):
        checks["end"] = ended
    return checks
