"""Runs ``deepspeed-ext verify``: plans the check, runs its two phases, and reports."""

from __future__ import annotations

import errno
import json
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

from deepspeed_ext.commands.verify import report
from deepspeed_ext.commands.verify.checks import Check, check_all
from deepspeed_ext.commands.verify.config import Plan, plan_check
from deepspeed_ext.commands.verify.figures import Failure, Found, merge
from deepspeed_ext.commands.verify.processes import START_RANK, Ended, Ranks
from deepspeed_ext.commands.verify.rank import CHECKPOINT, PLAN, result_file, step_file
from deepspeed_ext.commands.verify.refusal import (
    is_refusal,
    require_readable,
    require_section_readable,
)
from deepspeed_ext.config.file import read_json
from deepspeed_ext.errors import ConfigError
from deepspeed_ext.runtime.backend import get_accelerator
from deepspeed_ext.runtime.log import logger
from deepspeed_ext.runtime.progress import Progress
from deepspeed_ext.runtime.words import counted

__all__ = ["Outcome", "run_from_cli", "verify"]

RANKS_WITHOUT_ACCELERATOR = 2
DOES = {"train": "training", "resume": "resuming"}
NEEDED_BYTES, FULL_BYTES = 64 << 20, 1 << 20
"""Free bytes in the temporary folder: required before a check begins, and below which a failure is
blamed on the full disk."""


@dataclass(frozen=True)
class Outcome:
    """The report of a check, the output of a failed rank, and the warnings of the ranks."""

    plan: Plan
    checks: list[Check]
    output: str
    warnings: tuple[str, ...] = ()


def run_from_cli(arguments: Any) -> tuple[str, bool]:
    """The report for the parsed arguments, and whether nothing failed.

    Raises:
        ConfigError: the config cannot be read, or DeepSpeed refuses it.
    """
    config = read_json(arguments.config)
    count = 0 if get_accelerator().device_name() == "cpu" else get_accelerator().device_count()
    if arguments.ranks is not None and count and arguments.ranks > count:
        raise ConfigError(
            f"--ranks {arguments.ranks}: this machine has {counted(count, 'accelerator')}, and "
            "each rank needs one"
        )
    ranks = arguments.ranks or count or RANKS_WITHOUT_ACCELERATOR
    with _signals_noted() as leave:
        how = {
            "steps": arguments.steps,
            "upstream": arguments.upstream,
            "limit_seconds": arguments.timeout,
        }
        outcome = verify(config, ranks, **how, leave=leave)
    device = "an accelerator each" if count else "the CPU"
    facts = (
        arguments.config,
        outcome.plan,
        device,
        outcome.checks,
        outcome.output,
        outcome.warnings,
    )
    text = (
        json.dumps(report.as_json(*facts), indent=2) if arguments.json else report.as_text(*facts)
    )
    return text, report.passed(outcome.checks)


@contextmanager
def _signals_noted() -> Iterator[Callable[[], None]]:
    """Record signals that would end this process (SIGTERM, SIGHUP of a closing terminal, SIGINT)
    instead of ending at once.

    Yields a function that exits if a signal has come. So signals cannot interrupt cleanup.
    """
    came: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        came.append(number)

    def leave() -> None:
        if came:
            raise SystemExit(128 + came[0])

    before = {
        number: signal.getsignal(number)
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
    }
    # nohup ignores some of them
    ours = [number for number, handler in before.items() if handler not in (signal.SIG_IGN, None)]
    try:
        for number in ours:
            signal.signal(number, note)
        yield leave
    finally:
        for number in ours:
            signal.signal(number, before[number])
    leave()


def verify(
    config: dict[str, Any],
    ranks: int,
    *,
    steps: int | None = None,
    upstream: bool = False,
    limit_seconds: float = 600.0,
    start: str = START_RANK,
    kind: type[Ranks] = Ranks,
    leave: Callable[[], None] = lambda: None,
) -> Outcome:
    """Check a config.

    Args:
        steps: optimizer steps; None: enough for the config.
        upstream: train with stock DeepSpeed.
        limit_seconds: time limit for each of the two phases.
        start: module whose `main` runs a rank.
        kind: how the ranks are started.
        leave: called while ranks run; it may raise.

    Raises:
        ConfigError: the config contradicts itself, or DeepSpeed refuses it.
        OSError: the disk is too full for a checkpoint of the small model.
    """
    if not upstream:
        require_section_readable(config)
    with tempfile.TemporaryDirectory(
        prefix="deepspeed-ext-verify-", ignore_cleanup_errors=True
    ) as name:
        folder = Path(name)
        _require_room(folder, NEEDED_BYTES)
        plan = plan_check(config, ranks, steps, upstream, name)
        require_readable(plan.config, upstream)
        (folder / PLAN).write_text(json.dumps(asdict(plan)))
        plain = "" if plan.optimizer is None else f"as plain {plan.optimizer[0]} and "
        logger.info(
            f"verify: training {plan.steps} steps {plain}as the config says, "
            f"on {counted(ranks, 'rank')}"
        )
        found, ended = _phase(kind(folder, "train", ranks, start), plan, limit_seconds, leave)
        _require_accepted(found)
        resumed, after = None, None
        if (folder / CHECKPOINT / "latest").exists() and found.movements:
            logger.info("verify: resuming from step %d in new processes", plan.save_after)
            resumed, after = _phase(
                kind(folder, "resume", ranks, start), plan, limit_seconds, leave
            )
        checks = check_all(plan, found, resumed, ended.why, after.why if after is not None else "")
        if not report.passed(checks):
            _require_room(folder, FULL_BYTES)
    output = ended.output or (after.output if after is not None else "")
    warnings = tuple(
        dict.fromkeys((*ended.warnings, *(after.warnings if after is not None else ())))
    )
    return Outcome(plan, checks, output if not report.passed(checks) else "", warnings)


def _require_room(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < needed:
        why = (
            f"a check needs {NEEDED_BYTES >> 20} MiB for temporary files, "
            f"and {free >> 20} are free. Set TMPDIR to a larger folder"
        )
        raise OSError(errno.ENOSPC, why, str(folder.parent))


def _phase(
    ranks: Ranks, plan: Plan, limit_seconds: float, leave: Callable[[], None]
) -> tuple[Found, Ended]:
    def doing() -> str:
        step = _step_of(ranks)
        return f"verify: {DOES[ranks.phase]}{f', step {step} of {plan.steps}' if step else ''}"

    progress = Progress(doing, logger.info)

    def while_they_run() -> None:
        leave()
        progress.look()

    with ranks:
        ended = ranks.wait(limit_seconds, while_they_run)
    files = [result_file(ranks.folder, ranks.phase, rank) for rank in range(plan.ranks)]
    found = merge([Found.read(file) for file in files])
    # after a worker's death, any status may occur
    if not ended.why and found.failure is None and found.death is None:
        wrong = [
            f"rank {rank} ended with status {status}"
            for rank, status in enumerate(ended.statuses)
            if status
        ]
        ended = replace(ended, why="; ".join(wrong[:1]))
    return found, ended


def _step_of(ranks: Ranks) -> str:
    """The step that the ranks have reached; empty before the first."""
    try:
        return step_file(ranks.folder, ranks.phase).read_text()
    except OSError:  # not there yet
        return ""


def _require_accepted(found: Found) -> None:
    """Raise `ConfigError` if ``deepspeed.initialize`` refused the config."""
    failure: Failure | None = found.failure
    if failure is not None and failure.stage in ("plain", "initialize") and is_refusal(failure):
        raise ConfigError(f"this config cannot train: {failure}")
