"""Moves a run to the fastest plan that its steps allow, at most twice.

The first steps are synchronous (`Counting`), and some are measured with several thread counts
(`Probing`): they show how long a pass takes, and forward and backward without a pass beside them.
The first overlapped steps show how much the two delay each other (`Overlapping`). From that follows
how much the host should step (`plan.share`); `moving` moves the rest. Thread counts do not change
results.

A run that has had no such synchronous steps on this machine makes its own: `PROBED_STEPS` of its
overlapped steps end only when their pass has ended. The order of updates, and so every bit, stays.

From `STEPS_BETWEEN` steps after a choice on, the run is checked every `STEPS_LOOKED_AT` steps. If
steps wait, or the accelerator's time per step has changed, everything is measured again. The share
may then move after an overlapped step, too: the worker publishes y again, for the elements that
stay.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from deepspeed_ext.config import ZenFlowConfig
from deepspeed_ext.runtime import memory
from deepspeed_ext.runtime.log import logger
from deepspeed_ext.runtime.stopwatch import stopwatch
from deepspeed_ext.zenflow import moving
from deepspeed_ext.zenflow.plan.advice import MeasuredStep, remedies_of
from deepspeed_ext.zenflow.plan.lanes import traffic_of
from deepspeed_ext.zenflow.plan.partitions import share_bytes
from deepspeed_ext.zenflow.plan.places import Copies
from deepspeed_ext.zenflow.plan.plan import ZenFlowPlan
from deepspeed_ext.zenflow.plan.printed import as_config
from deepspeed_ext.zenflow.plan.probe import PROBED_STEPS, ThreadProbe
from deepspeed_ext.zenflow.plan.search import Measured, search_measured
from deepspeed_ext.zenflow.plan.share import (
    MEASURED_STEPS,
    UNITS,
    WATCHED_STEPS,
    ChainTimes,
    is_worth_it,
    with_copies_inside,
    with_heads,
    with_threads,
)
from deepspeed_ext.zenflow.step.metrics import Metrics
from deepspeed_ext.zenflow.step.optimizer import HostOptimizer
from deepspeed_ext.zenflow.step.schedule import StepPlan
from deepspeed_ext.zenflow.worker.kernel.passes import DTYPE_BYTES

__all__ = ["Tuner", "there_over_estimate"]

MOST_MOVES = 2
STEPS_BETWEEN = 200
"""Fewest steps from one choice to the next; doubled after each choice that changes nothing."""
STEPS_LOOKED_AT = 50
WAITS = 0.05
"""Fraction of a step: a longer wait starts a new measurement."""
CHANGED = 0.1
"""Fraction of the accelerator's time: a larger difference means that the batch has changed."""
MOST_SYNCHRONOUS = 32
"""Most further synchronous steps that a choice waits for overlapped ones."""
MOST_CONTENTION = 0.9
COUNTED_STEPS = MEASURED_STEPS - PROBED_STEPS
"""Synchronous steps before the probed ones."""


@dataclass
class Counting:
    """The synchronous steps before those that are probed.

    Attributes:
        steps: how many have ended.
    """

    steps: int = 0


@dataclass(frozen=True)
class Probing:
    """Steps whose passes run with several thread counts.

    Attributes:
        is_apart: see `Mover`.
    """

    probe: ThreadProbe
    is_apart: bool


@dataclass
class Overlapping:
    """Overlapped steps, which show how much pass and accelerator delay each other.

    Attributes:
        alone: what was measured without overlap.
        waited: steps of any kind that have ended since then.
        watched: how many of the last steps overlapped, one after the other.
    """

    alone: ChainTimes
    waited: int = 0
    watched: int = 0


class Tuner:
    """Chooses share and threads once enough successive synchronous steps have been measured, and
    again when the run has changed. All ranks of the model choose together.

    Args:
        config: ``offload_reserve_fraction`` of the accelerator's memory stays free above the peak
            of a step.
        chooses_share: whether the share may move; otherwise only threads do.
        threads: thread counts to try, the present one first.
    """

    def __init__(
        self,
        metrics: Metrics,
        config: ZenFlowConfig,
        *,
        chooses_share: bool,
        threads: Sequence[int],
    ) -> None:
        self._metrics = metrics
        self._reserve_fraction = config.offload_reserve_fraction
        self._chooses_share = chooses_share
        self._counts = threads
        self._phase: Counting | Probing | Overlapping | None = Counting()
        """What is being measured; None: nothing, until the run changes."""
        self._is_open = True
        """Whether the first choice is still to come."""
        self._known = ChainTimes(0.0, 0.0)
        """What the last choice was made from."""
        self._knows_delay = False
        self._moves = self._since = 0
        self._gap = STEPS_BETWEEN
        self.device_seconds = 0.0

    @property
    def is_apart(self) -> bool:
        """See `Mover`."""
        return isinstance(self._phase, Probing) and self._phase.is_apart

    def after_step(self, host: HostOptimizer, plan: StepPlan) -> None:
        """Count a step that has ended; choose if enough have been measured."""
        self._since += 1
        phase = self._phase
        is_between = plan.waits_last and host.rule.schedule.plan().waits_last
        if isinstance(phase, Overlapping):
            self._overlapped(host, phase, plan, is_between)
        elif self._is_open and not is_between:
            self._give_up(host)
        elif isinstance(phase, Probing):
            self._probed(host, phase, is_between)
        elif isinstance(phase, Counting):
            phase.steps += 1
            if phase.steps == COUNTED_STEPS:
                self._begin(host, is_between)
        elif not is_between and self._is_due(host) and self._has_changed(host):
            self._begin(host, is_between)

    def _give_up(self, host: HostOptimizer) -> None:
        """Too few synchronous steps were left: try again after `STEPS_BETWEEN` steps."""
        steps = _counted(self._phase)
        self._is_open = False
        self._break_off(host)
        if host.ranks.rank == 0 and self._chooses_share:
            logger.debug(
                f"offload_optimizer.ratio stays {host.decided.host_share:.4g} for now: only "
                f"{steps} of {MEASURED_STEPS} synchronous steps were left to measure"
            )

    def _break_off(self, host: HostOptimizer) -> None:
        """Measure no further; from the beginning if the first choice is still to come."""
        if isinstance(self._phase, Probing):
            self._limit(host, self._counts[0])
        self._phase = Counting() if self._is_open else None
        self._metrics.estimating = None

    # -- measuring ---------------------------------------------------------------------------------

    def _is_due(self, host: HostOptimizer) -> bool:
        """Whether to look for a change now; the same on all ranks."""
        return (
            self._moves < MOST_MOVES
            and host.decided.host_share > 0.0
            and self._since >= self._gap
            and self._since % STEPS_LOOKED_AT == 0
        )

    def _has_changed(self, host: HostOptimizer) -> bool:
        """Whether any rank's steps wait, or the accelerator's time differs from when the plan was
        chosen (another batch, accumulation or length). A collective."""
        changed = 0
        with host.link.deferring_errors():
            step = self._metrics.typical_step()
            if step is not None:
                waits, then = step.wait > WAITS * step.total, self.device_seconds
                differs = abs(step.device - then) > CHANGED * then
                changed = int(waits or differs)
        return host.ranks.minimum(-changed)[0] < 0

    def _begin(self, host: HostOptimizer, is_between: bool) -> None:
        is_apart = self._chooses_share and not (is_between or self._knows_delay)
        probe = ThreadProbe(self._counts, overlaps=not (is_between or is_apart))
        self._phase = Probing(probe, is_apart)
        self._limit(host, probe.coming)
        if is_apart:
            self._metrics.resume({})

    def _probed(self, host: HostOptimizer, phase: Probing, is_between: bool) -> None:
        """A step with the probe's threads has ended."""
        probe = phase.probe
        if not probe.is_over:
            probe.note(self._metrics.worker_seconds)
            self._limit(host, probe.best if probe.is_over else probe.coming)
        schedule = host.rule.schedule
        if not (probe.is_over and (is_between or schedule.is_settled)):
            return
        self._phase, is_alone = None, is_between or phase.is_apart
        times = ChainTimes(0.0, 0.0)
        with host.link.deferring_errors():
            times = self._times(host.decided, probe, is_alone)
        if is_alone and host.decided.rule.overlapped and self._chooses_share:
            self._phase = Overlapping(times)
            if not is_between:
                self._metrics.resume({})
            self._metrics.estimating = stopwatch()
            self._counts = _first(self._counts, probe.best)
        else:
            self._choose(host, times, probe.best, is_between)

    def _overlapped(
        self, host: HostOptimizer, phase: Overlapping, plan: StepPlan, is_between: bool
    ) -> None:
        """A step has ended while the choice waits for overlapped ones."""
        phase.waited += 1
        phase.watched = 0 if plan.waits_last else phase.watched + 1
        is_late = is_between and phase.waited >= MOST_SYNCHRONOUS
        if phase.watched < WATCHED_STEPS and not is_late:
            return
        self._phase, times = None, phase.alone
        with host.link.deferring_errors():
            step = None if is_between else self._metrics.typical_step()
            times = times if step is None else _contended(times, step, host.decided)
            self._metrics.estimating = None
        self._knows_delay = not is_between
        self._choose(host, times, self._counts[0], is_between)

    def _limit(self, host: HostOptimizer, threads: int) -> None:
        if len(self._counts) > 1:
            with host.link.deferring_errors():
                host.link.limit_threads(threads)

    def adopt(self, host: HostOptimizer, heads: Sequence[int]) -> None:
        """See `Mover.adopt`. A run whose share has moved keeps it."""
        if not self._chooses_share:
            return
        sizes = [state.master.numel() for state in host.states]
        blocks = host.rule.block_size
        fits = len(heads) == len(sizes) and all(
            head % blocks == 0 and head <= size for head, size in zip(heads, sizes, strict=False)
        )
        wants = not host.decided.has_share and fits and any(heads)
        wanted, fits_all = host.ranks.minimum(-int(wants), int(fits))
        if not (wanted and fits_all):
            return
        share = 1.0 - sum(heads) / max(1, sum(sizes))
        plan = with_heads(host.decided, heads, share, "the checkpoint's")
        moved = moving.move(host, plan, hides=False)
        if not moved and plan.copies is Copies.BESIDE_STEP:
            moved = moving.move(host, with_copies_inside(plan), hides=False)
        if moved:
            self._is_open = False
            self._break_off(host)

    def resumed(
        self,
        host: HostOptimizer,
        threads: int | None,
        device_seconds: float,
        *,
        is_elsewhere: bool,
        measured: Mapping[str, Any] | None,
    ) -> None:
        """See `Mover.resumed`. On another machine, everything is chosen anew, and so it is if the
        run had not chosen and its measurements do not fit."""
        self._break_off(host)
        fits = measured is not None and sorted(measured["threads"]) == sorted(self._counts)
        here = not is_elsewhere and (device_seconds > 0.0 or fits)
        is_here, goes_on = host.ranks.minimum(int(here), int(fits))
        if is_here and goes_on and self._is_open:
            assert measured is not None
            self._go_on(host, measured)
            return
        if not is_here:
            self.device_seconds, self._knows_delay = 0.0, False
            self._moves, self._since, self._gap = 0, STEPS_BETWEEN, STEPS_BETWEEN
            return
        self.device_seconds, self._since = device_seconds, 0
        if threads is not None and threads in self._counts[1:]:
            self._counts = _first(self._counts, threads)
            self._limit(host, threads)
            host.decided = with_threads(host.decided, threads)

    def measured(self) -> dict[str, Any] | None:
        """See `Mover.measured`."""
        phase = self._phase
        probed = list(phase.probe.noted) if isinstance(phase, Probing) else None
        overlapping = phase if isinstance(phase, Overlapping) else None
        is_known = all(map(math.isfinite, probed or ()))
        if not (self._is_open and is_known) or self.device_seconds > 0.0:
            return None
        return {
            "threads": list(self._counts),
            "steps": _counted(phase),
            "probed": probed,
            "alone": None if overlapping is None else asdict(overlapping.alone),
            "waited": 0 if overlapping is None else overlapping.waited,
            "watched": 0 if overlapping is None else overlapping.watched,
            "samples": self._metrics.samples(),
        }

    def _go_on(self, host: HostOptimizer, measured: Mapping[str, Any]) -> None:
        """Measure on from what `measured` returned."""
        self._counts = tuple(measured["threads"])
        self._metrics.resume(measured["samples"])
        threads = self._counts[0]
        if measured["alone"] is not None:
            kept = {field.name for field in fields(ChainTimes)}  # not those of earlier releases
            alone = ChainTimes(**{k: v for k, v in measured["alone"].items() if k in kept})
            self._phase = Overlapping(alone, measured["waited"], measured["watched"])
            self._metrics.estimating = stopwatch()
        elif measured["probed"] is not None:
            probe = ThreadProbe(self._counts, overlaps=False)
            for seconds in measured["probed"]:
                probe.note(seconds)
            self._phase = Probing(probe, is_apart=False)
            threads = probe.best if probe.is_over else probe.coming
        else:
            self._phase = Counting(measured["steps"])
        self._limit(host, threads)

    # -- choosing ----------------------------------------------------------------------------------

    def _of_all(
        self, host: HostOptimizer, times: ChainTimes, *, changes_threads: bool
    ) -> list[Measured]:
        """What every rank has measured, and its room. A collective."""
        now = host.decided
        mine = Measured.of(now, times, 0, changes_threads)
        with host.link.deferring_errors():
            reserve = round(memory.total_accelerator_bytes() * self._reserve_fraction)
            room = memory.unused_accelerator_bytes() - reserve
            mine = Measured.of(now, times, room, changes_threads)
        return host.ranks.gather_objects(mine)

    def _choose(
        self, host: HostOptimizer, times: ChainTimes, threads: int, is_between: bool
    ) -> None:
        """Choose with all ranks, and move. A collective."""
        now = host.decided
        changes = now.cpus is not None and threads != now.cpus.threads
        of_all = self._of_all(host, times, changes_threads=changes)
        moves = any(each.changes_threads for each in of_all)
        self._known, self._counts = times, _first(self._counts, threads)
        if changes:
            host.decided = with_threads(now, threads)
        if self._chooses_share:
            moves |= self._choose_share(host, of_all, is_between)
        self.device_seconds = times.beside(host.decided.host_share)
        self._gap = STEPS_BETWEEN if moves or self._is_open else 2 * self._gap
        self._since, self._moves, self._is_open = 0, self._moves + moves, False
        if moves and not is_between:  # what was measured is the other plan's
            self._metrics.resume({})
        if self._metrics.adviser is not None:
            remedies = remedies_of(host.decided, is_settled=True)
            self._metrics.adviser.settle(remedies, is_another=moves)
        if host.ranks.rank == 0 and (moves or self._chooses_share):
            logger.info(f"the plan as a config: {json.dumps(as_config(host.decided))}")

    def _choose_share(
        self, host: HostOptimizer, of_all: Sequence[Measured], is_between: bool
    ) -> bool:
        """Choose the share and move to it; return whether it moved. A collective."""
        now = host.decided
        found = search_measured(now, of_all)
        slowest = max((each.times for each in of_all), key=lambda times: times.worker)
        least = max(each.least[0] for each in of_all) / UNITS
        why = (
            f"a pass over all elements takes {slowest.worker * 1e3:.1f} ms, copies "
            f"{slowest.link * 1e3:.1f} ms, the accelerator {slowest.device * 1e3:.1f} ms between "
            f"two steps, and every rank has room for {1.0 - least:.1%} of its optimizer"
        )
        if slowest.contention:
            why = f"{why}; a second of a pass delays the accelerator by {slowest.contention:.2f} s"
        moved = False
        if is_worth_it(now, found.share):
            if not is_between:  # the next step publishes y again, without what moves
                host.expose(shows_moments=False)
            moved = moving.move_share(host, found.plan, found.share, why)
            why = why if moved else f"{why}; but a rank could not allocate it"
        if host.ranks.rank == 0:
            logger.info(f"offload_optimizer.ratio is {host.decided.host_share:.4g}: {why}")
            if host.decided.copies is not now.copies:
                told = (each for each in host.decided.reasons if each.about == "copies")
                logger.info(str(*told))
        return moved

    def _times(self, plan: ZenFlowPlan, probe: ThreadProbe, is_alone: bool) -> ChainTimes:
        """This rank's measurements, scaled to a step with all elements on the host."""
        step = None if is_alone else self._metrics.typical_step()
        scale = _scale(plan)
        if step is not None:
            before = probe.seconds(self._counts[0])
            gain = probe.seconds(probe.best) / before if before > 0.0 else 1.0
            link = _slower_way(plan, step.link or step.exposed_copies)
            known = self._known
            device = step.device - known.contention * min(step.worker, step.device)
            worker = scale * gain * step.worker
            return replace(known, device=device, worker=worker, link=scale * link)
        worker, device = self._metrics.typical()
        if len(self._counts) > 1:
            worker = probe.seconds(probe.best)
        waited = self._metrics.wait_seconds
        chunks, size = 0, plan.chunks
        if size is not None:
            chunks = sum(-(-each.on_host // size.numel) for each in plan.partitions)
        # a synchronous step waits for all copies, an overlapped one for those of one chunk
        copies = waited - self._metrics.worker_seconds  # its own pass, perhaps on few threads
        fixed = max(0.0, copies) / chunks if chunks and math.isfinite(copies) else 0.0
        both = self._metrics.link_seconds
        link = _slower_way(plan, both) if math.isfinite(both) else 0.0
        return ChainTimes(device, scale * worker, scale * link, fixed)


def _counted(phase: Counting | Probing | Overlapping | None) -> int:
    """Synchronous steps before the probed ones that have ended."""
    return phase.steps if isinstance(phase, Counting) else COUNTED_STEPS


def _first(counts: Sequence[int], count: int) -> tuple[int, ...]:
    """`counts` with `count` moved to the front."""
    return (count, *(each for each in counts if each != count))


def _slower_way(plan: ZenFlowPlan, both: float) -> float:
    """The seconds of the slower direction, of `both` seconds of copies in both."""
    moves = traffic_of(plan)
    return both * max(moves.down, moves.up) / (moves.down + moves.up)


def _scale(plan: ZenFlowPlan) -> float:
    """All elements over those on the host."""
    on_host = sum(each.on_host for each in plan.partitions)
    return sum(each.numel for each in plan.partitions) / max(1, on_host)


def _contended(alone: ChainTimes, step: MeasuredStep, plan: ZenFlowPlan) -> ChainTimes:
    """Times measured without overlap, updated with an overlapped `step` of `plan`."""
    scale = _scale(plan)
    beside = min(step.worker, step.device)
    contention = max(0.0, step.device - alone.device) / beside if beside > 0.0 else 0.0
    return replace(
        alone,
        worker=scale * step.worker,
        link=scale * _slower_way(plan, step.link) if step.link else alone.link,
        contention=min(MOST_CONTENTION, contention),
        there=there_over_estimate(plan) * scale * step.estimate,
    )


def there_over_estimate(plan: ZenFlowPlan) -> float:
    """Bytes of an exact step on the accelerator over those of an estimate: 28 and 6 per element
    with fp32 moments. Both are bound by memory."""
    dtypes, block_size = plan.dtypes, plan.rule.block_size
    gradient, published = DTYPE_BYTES[dtypes.gradient], DTYPE_BYTES[dtypes.published]
    weights = DTYPE_BYTES[dtypes.weights]
    stepped = 2 * share_bytes(plan.rule, block_size) / block_size + gradient + weights
    return stepped / (gradient + published + weights)
