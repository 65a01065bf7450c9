"""Measures how many cores each rank's optimizer needs on this host.

All local ranks run at once, as real processes on the cores that the plan would give them, because
they share memory channels. The tuner first measures the optimizer alone with a rising number of
cores. It then runs a launch-bound training step beside the optimizer, to see whether the cores left
for PyTorch are enough.
"""

import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from typing import Any

from deepspeed_ext.cores import accelerators
from deepspeed_ext.cores.plan import HostPlan, PlanRequest, plan_host
from deepspeed_ext.cores.report import HostFacts, read_host
from deepspeed_ext.cores.threads import WorkerPlacement
from deepspeed_ext.cores.topology import read_accelerator_node, read_cache_bytes
from deepspeed_ext.cores.tune.measuring_process import BYTES_PER_ELEMENT, Steps
from deepspeed_ext.cores.tune.plot import plot_format, plot_result
from deepspeed_ext.cores.tune.processes import ForeignLoad, MeasuringProcesses
from deepspeed_ext.cores.tune.sweep import (
    NOISY_SPREAD,
    Point,
    Sweep,
    choose,
    relative_spread,
    training_choice,
)
from deepspeed_ext.errors import ConfigError, OutOfMemoryError, WorkerError
from deepspeed_ext.runtime.host_memory import available_host_bytes
from deepspeed_ext.runtime.log import logger
from deepspeed_ext.runtime.output_file import OutputFile
from deepspeed_ext.runtime.words import counted

__all__ = ["TuneSettings", "Tuner", "local_host", "run_from_cli"]

STEADY_SPREAD = 0.03
HOST_MEMORY_FRACTION = 0.25
STATE_BYTES_PER_ELEMENT = 16  # fp32 parameter, gradient and two moments
TRIED_TRAINING_SPLITS = 4

Report = Callable[[str], None]


@dataclass(frozen=True)
class TuneSettings:
    """How much to measure."""

    elements: int
    """Number of fp32 parameters per rank that each measured step updates."""
    warm_up_steps: int = 2
    minimum_steps: int = 7
    maximum_steps: int = 25
    training_seconds: float = 3.0
    """Duration of the training measurement for each split."""
    deadline_seconds: float | None = None
    """No measurement starts after this time; None: no limit."""
    hidden_seconds: float | None = None
    """Time that the accelerator leaves the optimizer for a step over ``elements`` parameters; None:
    unknown."""

    @classmethod
    def for_host(cls, ranks: int, *, quick: bool, elements: int | None = None) -> "TuneSettings":
        """Choose buffers of eight times the cache size (quick: four times), but at most a quarter
        of free host memory.

        Args:
            quick: measure less, in under 20 seconds.
            elements: parameters per rank; None: chosen from the cache size.

        Raises:
            OutOfMemoryError: free memory does not suffice for one element per rank.
        """
        cache_elements = read_cache_bytes() // BYTES_PER_ELEMENT
        wanted = (
            max(8 << 20, min(4 * cache_elements, 32 << 20))
            if quick
            else max(64 << 20, 8 * cache_elements)
        )
        memory = available_host_bytes()
        fitting = int(HOST_MEMORY_FRACTION * memory) // (ranks * STATE_BYTES_PER_ELEMENT)
        if fitting < 1:
            raise OutOfMemoryError(
                f"{memory} bytes of free host memory are too few "
                f"to measure {counted(ranks, 'rank')}; free some memory"
            )
        settings = cls(min(elements or wanted, fitting))
        if quick:
            settings = replace(
                settings, maximum_steps=11, training_seconds=1.0, deadline_seconds=12.0
            )
        return settings


def local_host(
    ranks: int | None, allowed: Sequence[str] | None, accelerator_nodes: Sequence[int | None] | None
) -> HostFacts:
    """Read this host; by default with one local rank per accelerator, on its NUMA node, and at
    least one rank.

    Raises:
        ConfigError: the arguments contradict each other or the host.
        UnsupportedError: the host does not describe its cores.
    """
    if allowed or accelerator_nodes:
        host = read_host("/", allowed, accelerator_nodes)
        if ranks not in (None, len(host.ranks)):
            raise ConfigError(
                f"--ranks {ranks}, but --allowed or --gpu-node was given "
                f"{counted(len(host.ranks), 'time')}: give it once per rank"
            )
        return host
    number = ranks or max(1, accelerators.count())
    host = read_host("/", None, [None] * number)
    found = []
    for rank in host.ranks:
        address = (
            accelerators.pci_address(rank.local_rank)
            if rank.local_rank < accelerators.count()
            else None
        )
        node = read_accelerator_node(host.topology, address) if address else None
        found.append(replace(rank, accelerator_node=node))
    return replace(host, ranks=tuple(found))


class Tuner:
    """Measures one host; a context manager that ends its processes.

    Args:
        report: called with a line of text before each measurement.
    """

    def __init__(
        self, host: HostFacts, settings: TuneSettings, report: Report = lambda text: None
    ) -> None:
        self.host = host
        self.settings = settings
        self.report = report
        self.records: list[dict[str, object]] = []
        """One record per point and rank."""
        self._start = time.monotonic()
        self._optimizers: MeasuringProcesses | None = None
        self._stack = ExitStack()

    def __enter__(self) -> "Tuner":
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def plan(self, optimizer_cores: int) -> HostPlan:
        """Plan the host with this many optimizer cores per rank."""
        return plan_host(
            self.host.topology, self.host.ranks, PlanRequest(optimizer_cores=optimizer_cores)
        )

    @property
    def maximum(self) -> int:
        """The most optimizer cores that every rank can have."""
        return min(len(rank.optimizer) for rank in self.plan(len(self.host.topology.cores)).ranks)

    def run(self) -> dict[str, object]:
        """Measure, choose, and return the result, as ``--json`` prints it.

        Raises:
            WorkerError: no number of cores could be measured.
        """
        points = Sweep(self.maximum, self.measure, self._out_of_time).run()
        if not any(point.gb_per_s for point in points):
            raise WorkerError(f"no number of cores could be measured: {points[0].noise}")
        fastest = choose(points)
        cores = choose(points, self.settings.hidden_seconds)
        alone, training = self.measure_training(
            [point.cores for point in points if point.cores <= cores]
        )
        chosen = training_choice(
            {int(split["optimizer_cores"]): split["slowdown"] for split in training}
        )
        at = next(point for point in points if point.cores == chosen)
        return {
            "ranks": len(self.host.ranks),
            "opt_cores_per_rank": chosen,
            "pt_cores_per_rank": min(rank.pytorch_threads for rank in self.plan(chosen).ranks),
            "saturated": fastest < self.maximum,
            "bw_gbs": at.gb_per_s,
            "noisy": bool(at.noise),
            "elements": self.settings.elements,
            "points": [asdict(point) for point in points],
            "training": {"alone_seconds": alone, "splits": training},
        }

    def _out_of_time(self) -> bool:
        deadline = self.settings.deadline_seconds
        return deadline is not None and time.monotonic() - self._start > deadline

    def measure(self, cores: int) -> Point:
        """Measure the step time of all ranks' optimizers at once, on ``cores`` cores each."""
        self.report(f"optimizer on {counted(cores, 'core')}")
        plan = self.plan(cores)
        foreign_load = ForeignLoad({cpu for rank in plan.ranks for cpu in rank.optimizer})
        try:
            optimizers = self._start_or_move_optimizers(plan)
            for _ in range(self.settings.warm_up_steps):
                optimizers.ask(Steps(1))
            foreign_load.begin(optimizers.pids)
            taken = self._timed_steps(optimizers)
            doubt = foreign_load.verdict()
        except WorkerError as error:
            self._end_optimizers()
            return Point(cores, None, 0.0, 0.0, str(error))
        slowest = max(taken, key=statistics.median)
        median, spread = statistics.median(slowest), relative_spread(slowest)
        noise = doubt or (f"steps vary by {spread:.0%}" if spread > NOISY_SPREAD else "")
        traffic = self.settings.elements * BYTES_PER_ELEMENT / 1e9
        for rank, seconds in zip(plan.ranks, taken, strict=True):
            self.records.append(
                {
                    "optimizer_cores": cores,
                    "local_rank": rank.local_rank,
                    "numa_node": rank.optimizer_node,
                    "median_seconds": statistics.median(seconds),
                    "spread": relative_spread(seconds),
                    "gb_per_s": traffic / statistics.median(seconds),
                    "noise": noise,
                }
            )
        return Point(cores, median, spread, traffic / median, noise)

    def _timed_steps(self, optimizers: "MeasuringProcesses") -> list[list[float]]:
        """Take steps on all ranks together until all are steady or the limit is reached; seconds by
        rank and step."""
        taken: list[list[float]] = [[] for _ in self.host.ranks]
        while len(taken[0]) < self.settings.maximum_steps:
            for mine, (seconds,) in zip(taken, optimizers.ask(Steps(1)), strict=True):
                mine.append(seconds)
            steady = (
                all(relative_spread(mine) <= STEADY_SPREAD for mine in taken)
                if len(taken[0]) > 1
                else False
            )
            if steady and len(taken[0]) >= self.settings.minimum_steps:
                break
        return taken

    def measure_training(self, tried: Sequence[int]) -> tuple[float, list[dict[str, float]]]:
        """Measure a launch-bound training step beside the optimizer, with the most optimizer cores
        first.

        Args:
            tried: numbers of optimizer cores.

        Returns:
            Seconds of the training step alone, on all cores but one, and a record per measured
            split.
        """
        self.report("training alone")
        seconds = self.settings.training_seconds
        first = self.plan(1)
        with MeasuringProcesses(
            "training", [WorkerPlacement(frozenset(rank.pytorch)) for rank in first.ranks], 0
        ) as training:
            training.move(first, "pytorch")
            training.ask(Steps(5))
            alone = max(statistics.median(taken) for taken in training.ask(Steps(20, seconds)))
            splits: list[dict[str, float]] = []
            for cores in sorted(tried, reverse=True)[:TRIED_TRAINING_SPLITS]:
                if splits and self._out_of_time():
                    break
                self.report(f"training beside the optimizer on {counted(cores, 'core')}")
                plan = self.plan(cores)
                optimizers = self._start_or_move_optimizers(plan)
                training.move(plan, "pytorch")
                optimizers.send(Steps(1, seconds + 0.5))
                training.ask(Steps(3))
                step = max(statistics.median(taken) for taken in training.ask(Steps(20, seconds)))
                optimizers.collect()
                threads = min(rank.pytorch_threads for rank in plan.ranks)
                splits.append(
                    {
                        "optimizer_cores": cores,
                        "pytorch_cores": threads,
                        "step_seconds": step,
                        "slowdown": step / alone - 1,
                    }
                )
                if (
                    len(splits) > 1
                    and splits[-1]["slowdown"] >= splits[-2]["slowdown"] - STEADY_SPREAD
                ):
                    break
        return alone, splits

    def _start_or_move_optimizers(self, plan: HostPlan) -> "MeasuringProcesses":
        """Return the ranks' optimizer processes, moved to their cores in ``plan``; start them if
        necessary."""
        if self._optimizers is None:
            placements = [WorkerPlacement.of(rank) for rank in plan.ranks]
            processes = MeasuringProcesses("optimizer", placements, self.settings.elements)
            self._optimizers = self._stack.enter_context(processes)
        self._optimizers.move(plan, "optimizer")
        return self._optimizers

    def _end_optimizers(self) -> None:
        self._stack.close()
        self._optimizers = None


@dataclass(frozen=True)
class _Outputs:
    """The output files, checked before anything is measured."""

    result: OutputFile | None
    records: OutputFile | None
    """A file beside `result`; None without one, or if it is not a regular file but, for instance, a
    device."""
    picture: OutputFile | None
    picture_format: str = ""

    @classmethod
    def check(cls, output: str | None, plot: str | None) -> "_Outputs":
        """Check that every file can be written.

        Args:
            output: ``--output``; None: the result is only printed.
            plot: ``--plot``; None: no picture.

        Raises:
            ConfigError: a file cannot be written, or two names mean the same file.
            UnsupportedError: ``plot`` is given and matplotlib is not installed.
        """
        picture_format = plot_format(plot) if plot is not None else ""
        result = OutputFile.check(output, "--output") if output is not None else None
        picture = OutputFile.check(plot, "--plot") if plot is not None else None
        records = None
        if result is not None and not result.in_place:
            beside = result.path.with_suffix(".jsonl")
            beside = beside if beside != result.path else result.path.with_suffix(".records.jsonl")
            records = OutputFile.check(beside, "the records beside --output")
        if picture is not None and picture in (result, records):
            raise ConfigError(
                f"--plot {plot!r} is also the file of the result "
                "or its records; choose another name"
            )
        return cls(result, records, picture, picture_format)

    def write(self, result: dict[str, Any], records: Sequence[dict[str, object]]) -> None:
        if self.result is not None:
            self.result.write(f"{json.dumps(result, indent=2)}\n".encode())
        if self.records is not None:
            self.records.write("".join(json.dumps(record) + "\n" for record in records).encode())
        if self.picture is not None:
            self.picture.write(plot_result(result, self.picture_format))


def run_from_cli(arguments: Any) -> Iterator[str]:
    """Tune as the command line asks, and yield the text to print: the result, before it is written
    into a file, and that file's path.

    Raises:
        ConfigError: the arguments contradict each other or the host, or the result cannot be
            written.
        UnsupportedError: ``--plot`` is given and matplotlib is not installed.
        OutOfMemoryError: too little host memory is free.
        WorkerError: no number of cores could be measured, or the result was disturbed and no file
            was named for it.
    """
    if arguments.gpu_step_ms is not None and arguments.elements is None:
        raise ConfigError(
            "--gpu-step-ms needs --elements, the number of parameters that each rank updates"
        )
    if arguments.plot is not None:
        plot_format(arguments.plot)  # fail early: this needs no measurement
    host = local_host(arguments.ranks, arguments.allowed, arguments.gpu_node)
    _require_cores(host)
    settings = TuneSettings.for_host(
        len(host.ranks), quick=arguments.quick, elements=arguments.elements
    )
    if arguments.gpu_step_ms is not None:
        # The measured step may be smaller than the real one.
        # Time is proportional to the number of elements.
        seconds = arguments.gpu_step_ms / 1e3 * arguments.update_interval
        settings = replace(
            settings, hidden_seconds=seconds * settings.elements / arguments.elements
        )
    begin = time.monotonic()

    def report(text: str) -> None:
        logger.info(f"tune: measuring {text} ... {time.monotonic() - begin:.0f} s")

    with Tuner(host, settings, report) as tuner:
        outputs = _Outputs.check(arguments.output, arguments.plot)
        result = tuner.run()
        records = tuner.records
    yield json.dumps(result) if arguments.json else as_text(result)
    if result["noisy"] and outputs.result is None:
        raise WorkerError(
            f"the measurement was disturbed ({_doubt(result)}): end other work on these cores and "
            "tune again, or keep the result with --output FILE"
        )
    outputs.write(result, records)
    if outputs.result is not None and not arguments.json:
        yield f"written to {outputs.result.path}"


def _require_cores(host: HostFacts) -> None:
    """Raise `ConfigError` if this host has not two cores for each rank, for PyTorch and the
    optimizer."""
    cores = {
        core for rank in host.ranks for core in host.topology.cores if set(core.pus) & rank.allowed
    }
    most = len(cores) // 2
    if len(host.ranks) > max(1, most):
        raise ConfigError(
            f"--ranks {len(host.ranks)}: {counted(len(cores), 'core')} may be used here, and a "
            "rank needs two, one for PyTorch and one for the optimizer: give at most --ranks "
            f"{max(1, most)}"
        )


def _doubt(result: Any) -> str:
    """Why the chosen point is doubtful."""
    return next(
        point["noise"]
        for point in result["points"]
        if point["cores"] == result["opt_cores_per_rank"]
    )


def as_text(result: Any) -> str:
    """Describe the result for people; unless it was disturbed, with the line to put into a
    config."""
    lines = [
        f"{counted(result['ranks'], 'local rank')} at once, {result['elements']:,} parameters each"
    ]
    lines.append("cores GB/s per rank ms per step   spread")
    for point in result["points"]:
        mark = "  <- chosen" if point["cores"] == result["opt_cores_per_rank"] else ""
        doubt = f"  ({point['noise']})" if point["noise"] else ""
        seconds = point["step_seconds"]
        took = "failed" if seconds is None else f"{seconds * 1e3:.1f}"
        lines.append(
            f"{point['cores']:5d} {point['gb_per_s']:13.1f} {took:>11} "
            f"{point['spread']:7.1%}{doubt}{mark}"
        )
    lines.append("PyTorch beside the optimizer (launch-bound step, against PyTorch alone):")
    for split in result["training"]["splits"]:
        lines.append(
            f"  {counted(split['pytorch_cores'], 'core')} for PyTorch, {split['optimizer_cores']} "
            f"for the optimizer: {split['step_seconds'] * 1e3:.2f} ms, {split['slowdown']:+.1%}"
        )
    if not result["saturated"]:
        lines.append("not saturated: the optimizer could use more cores than each rank has here")
    if not result["noisy"]:
        lines.append("For training on this host with as many ranks, under zero_optimization:")
        lines.append(f'  "zenflow": {{ "pt_reserved_cores": {result["pt_cores_per_rank"]} }}')
    return "\n".join(lines)
