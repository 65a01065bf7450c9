"""Compare the plan that a run chooses with the best of an exhaustive sweep, on a grid of machines.

    python -m tests.simulated.automatic [--write]
    python -m tests.simulated.automatic --simulated     # replaces the page's last section

The grid: copies of all elements take 0.1 to 2 steps of the accelerator, the pass 0.25 to 4, between
nothing and all of the optimizer fits into the accelerator, stages 2 and 3, 1 to 4 ranks of which
some are slower. A step is as long as a model of lanes says: it is virtual time, not a device. The
sweep takes 65 shares, with copies beside and inside of the step, as far as they fit. Then runs
whose batches, cores or ranks change, in virtual time. `--write` writes the page and its picture,
which needs matplotlib (the extra `plots`).
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import subprocess
from collections.abc import Iterator, Sequence
from datetime import date
from pathlib import Path

from deepspeed_ext.zenflow.plan.chunks import MOST_CHUNKS
from deepspeed_ext.zenflow.plan.places import Copies
from deepspeed_ext.zenflow.plan.probe import thread_counts
from deepspeed_ext.zenflow.plan.search import Measured, search_measured
from deepspeed_ext.zenflow.plan.share import ChainTimes, is_worth_it
from tests.simulated.overlap import UP_OVER_DOWN, Way, figures
from tests.support.lanes_grid import FREE, LINKS, NUMEL, RANKS, WORKERS, Machine
from tests.support.paths import ROOT
from tests.support.virtual_run import THREADS, VirtualRun, phases
from tests.support.virtual_run import Machine as Moment

PAGE = ROOT / "docs" / "lab" / "archive" / "automatic_plan.md"
PICTURE = PAGE.with_suffix(".svg")
STAGES = (2, 3)
WITHIN = 0.03
STEPS = 600
SHOWN_LINK = 0.3
LAYERS, CHUNKS = 64, MOST_CHUNKS
SHARES = (1.0, 0.75, 0.5, 0.25, 0.0)
SIMULATED = [(0.4, 0.5), (0.4, 1.9), (0.1, 4.0), (1.5, 1.0)]
"""Link and worker, in steps, on the simulated accelerator."""
DELAYS, THERE, SLOWER = (0.0, 0.1, 0.33, 0.6), (0.0, 0.05, 0.1), ((), (1.5,), (0.5, 2.0, 1.0))
CORES, CHOSEN = (THREADS, THREADS * 3 // 4), 20
RESUMED = 100
"""For `measured_losses`: steps after which a run has chosen, from the start and from a load."""
INTERVALS, LEFT = (2, 4, 8), (THREADS, THREADS * 3 // 4, THREADS // 2)
CHANGES = {
    "constant, the worker takes 2 steps": [Moment(worker=2.0)],
    "batches become a quarter": [Moment(), Moment(device=0.25)],
    "batches become twice as long": [Moment(worker=2.0), Moment(2.0, 2.0)],
    "batches vary: 1, 0.7, 1": [Moment(worker=1.5), Moment(0.7, 1.5), Moment(1.0, 1.5)],
    "a second job takes half of the cores for 600 steps": [
        Moment(worker=0.9),
        Moment(worker=0.9, cores=THREADS // 2),
        Moment(worker=0.9),
    ],
    "one of two ranks takes twice as long": [Moment(worker=0.6, slower=(2.0,))],
    "three ranks take 1, 0.5 and 4 times as long": [Moment(worker=0.9, slower=(0.5, 4.0))],
    "a pass delays forward and backward by a third of its time": [
        Moment(worker=1.9, contention=0.33, there=0.1),
    ],
    "a pass delays them by a tenth, the accelerator's own step as much": [
        Moment(worker=0.9, contention=0.1, there=0.09),
    ],
}
"""The phases of a run, of `STEPS` steps each."""


def losses() -> dict[Machine, float]:
    """For each machine, how many times as long as the best of the sweep the chosen step takes."""
    found = {}
    for values in itertools.product(LINKS, WORKERS, FREE, RANKS, STAGES):
        machine = Machine(*values)
        plans = [machine.plan(1.0, hide_transfers=hides) for hides in (True, False)]
        found[machine] = machine.loss(*plans)
    return found


def table_of(found: dict[Machine, float]) -> list[str]:
    """The worst ratio for each link and worker, over memory, ranks and stages."""
    lines = [
        "| link / worker | " + " | ".join(f"{worker:g}" for worker in WORKERS) + " |",
        "|---|" + "---|" * len(WORKERS),
    ]
    for link in LINKS:
        cells = []
        for worker in WORKERS:
            here = [
                loss for each, loss in found.items() if (each.link, each.worker) == (link, worker)
            ]
            cells.append(f"{max(here):.3f}")
        lines.append(f"| {link:g} | " + " | ".join(cells) + " |")
    return lines


def changes_table() -> list[str]:
    """A row for each run that changes."""
    lines = ["| what changes | step over the best, by phase | share, threads at the end | moves |"]
    lines.append("|---|---|---|---|")
    for name, machines in CHANGES.items():
        run = VirtualRun(machines[0])
        ratios = ", ".join(f"{ratio:.3f}" for ratio in phases(run, machines, STEPS))
        share, threads = run.plans[-1]
        lines.append(f"| {name} | {ratios} | {share:.2f}, {threads} of {THREADS} | {run.moves} |")
    return lines


def measured_losses(*, resumes: bool = False) -> dict[Moment, float]:
    """How many times as long as the best step a step takes that a run has chosen from what it
    measured: passes that delay the accelerator, steps there that take time, ranks of unequal speed,
    and cores that others use. If it `resumes`, it comes from another machine."""
    grid = itertools.product(WORKERS, DELAYS, THERE, SLOWER, CORES)
    found = {}
    for worker, contention, there, slower, cores in grid:
        machine = Moment(1.0, worker, cores, slower, contention, there)
        run = VirtualRun(Moment() if resumes else machine)
        run.run(CHOSEN)
        if resumes:
            run = run.saved(is_elsewhere=True)
            run.machine = machine
            run.run(RESUMED)
        found[machine] = run.seconds / machine.best
    return found


def measured_table(found: dict[Moment, float]) -> list[str]:
    """The worst ratio for each delay and worker."""
    lines = ["| delay / worker | " + " | ".join(f"{worker:g}" for worker in WORKERS) + " |"]
    lines.append("|---|" + "---|" * len(WORKERS))
    for delay in DELAYS:
        worst = (
            max(x for each, x in found.items() if (each.contention, each.worker) == (delay, worker))
            for worker in WORKERS
        )
        lines.append(f"| {delay:g} | " + " | ".join(f"{ratio:.3f}" for ratio in worst) + " |")
    return lines


def threads_table() -> list[str]:
    """Under the selective rule: how many times as long as with the best count of threads a step
    takes with all of them, by interval and cores that are left. A result is applied one step after
    its hand-over, so a step waits for what a pass takes longer, once per interval."""
    lines = ["| interval | " + " | ".join(f"{cores} of {THREADS} cores" for cores in LEFT) + " |"]
    lines.append("|---|" + "---|" * len(LEFT))

    def lost(interval: int, cores: int, worker: float) -> float:
        machine = Moment(1.0, worker, cores)
        passes = (machine.passed(threads, 1.0) for threads in thread_counts(THREADS))
        steps = [1.0 + max(0.0, seconds - 1.0) / interval for seconds in passes]
        return steps[0] / min(steps)

    for interval in INTERVALS:
        spans = ([lost(interval, cores, worker) for worker in WORKERS] for cores in LEFT)
        cells = " | ".join(f"{min(each):.2f} to {max(each):.2f}" for each in spans)
        lines.append(f"| {interval} | {cells} |")
    return lines


def made() -> str:
    """Date and commit, for the page."""
    said = ["git", "log", "-1", "--format=commit `%h`"]
    commit = subprocess.run(said, cwd=ROOT, capture_output=True, text=True, check=False).stdout
    return ", ".join(filter(None, [f"{date.today():%-d %B %Y}", commit.strip()]))


def page_of(found: dict[Machine, float]) -> str:
    """The whole page."""
    ratios = list(found.values())
    beyond = [each for each, loss in found.items() if loss > 1.0 + WITHIN]
    exposed = sum(each.automatic.copies is Copies.INSIDE_STEP for each in found)
    rows, measured, resumed = len(found), measured_losses(), measured_losses(resumes=True)
    told = "All rows are" if not beyond else f"{rows - len(beyond)} rows are"
    missed = [f"- Not within: {each}, {found[each]:.3f}." for each in beyond]
    return _PAGE.format(
        rows=rows,
        first_link=LINKS[0],
        last_link=LINKS[-1],
        first_worker=WORKERS[0],
        last_worker=WORKERS[-1],
        groups=len(RANKS),
        told="\n".join([f"{told} within {WITHIN:.0%} of it", *missed]),
        worst=max(ratios),
        median=statistics.median(ratios),
        exposed=exposed,
        table="\n".join(table_of(found)),
        link=SHOWN_LINK,
        picture=PICTURE.name,
        steps=STEPS,
        changes="\n".join(changes_table()),
        made=made(),
        measured=len(measured),
        measured_worst=max(measured.values()),
        chosen_at=CHOSEN,
        resumed_worst=max(resumed.values()),
        measured_table="\n".join(measured_table(measured)),
        threads="\n".join(threads_table()),
    )


_PAGE = """# The plan that a run chooses

You want to know how near a run comes to the best plan by itself. **Virtual time: a model of lanes,
no device.**

`python -m tests.simulated.automatic --write`, {made}.

## {rows:,} machines

Copies of all elements take {first_link:g} to {last_link:g} steps one way, a pass {first_worker:g}
to {last_worker:g}; nothing to all of the optimizer fits into the accelerator; {groups} groups of
1 to 4 ranks, whose passes take 0.5 to 2 times as long; stages 2 and 3. The sweep takes 65 shares,
with copies beside and inside of the step, as far as they fit.

{told}: worst {worst:.3f}, median {median:.3f}. In {exposed} rows landing buffers gave way to a
larger share. The worst step over the best, by link (rows) and worker (columns):

{table}

![Steps on the host alone, as chosen, and the best of the sweep, link of {link:g} steps]({picture})

The model leaves out fixed costs of a chain of chunks, launches and the gather. The choice knows the
lanes as exactly as the model; a run measures them.

## {measured} runs that measure

The real choice around steps that only count seconds, {chosen_at} of them, six of which overlap and
are measured before the choice. A pass delays forward and backward by 0 to 0.6 of its time (rows)
and takes 0.25 to 4 steps (columns), a step of everything on the accelerator 0 to 0.1, and room is
there for all; one to four ranks, of which some are slower; 8 or 6 cores for 8 threads. The worst
step over the best of a sweep of shares and threads is {measured_worst:.3f}:

{measured_table}

## Runs that change

The real choice around steps that only count seconds: {steps} steps a phase, 10 of them synchronous
at the start. A pass waits for the thread on the busiest core.
Not covered: batches whose lengths differ from step to step while the choice measures. It takes
medians of six to eight steps, so chance may look like delay, and more than needed then steps on the
accelerator: exact either way, and within the reserve.

{changes}

## Resumed runs

A checkpoint from before the choice has what was measured, so the resumed run chooses at the same
step, wherever in the first 16 steps it was saved (`test_settling.py`). On another machine the run
measures again from 50 steps after the load on. Six of its steps end only when their pass has ended:
they show forward and backward alone, six later ones by how much a pass delays them. The order of
updates stays, and so does every bit (`test_measuring_elsewhere.py`). Of {measured} runs that come
from a machine on which all stayed on the host to those above, the worst step over the best is
{resumed_worst:.3f}.

## Under the selective rule

A run under the selective rule keeps the plan that it begins with. What could it move without
rounding, and what would that gain?

- *Gradients on the host or the accelerator, copies beside or inside of the step*: no numbers
  change. They are chosen before the first step, by the search that all rules share. The
  predictive rule changes them later only to make room for a larger share.
- *A share on the accelerator*: numbers change, because cold elements would step at every step, not
  once per interval. The config gives it, or free memory with `"ratio": "auto"`. Hot blocks are such
  a share, which moves at each selection.
- *Threads of the optimizer process*: no bit changes (tested). Core binding gives them at the start.
- *Cores and chunks*: no numbers change, and under no rule do they move.

So threads are left. What a step takes with all of them, over one with the best of three counts, for
passes of 0.25 to 4 steps (arithmetic; a result is applied one step after its hand-over, so what a
pass takes longer than a step is waited for once per interval):

{threads}

Where the optimizer process has its cores to itself, nothing is lost. Something is lost only while
others use a quarter of them or less: then two threads share a core, and fewer threads would be
faster. To time three counts twice takes six passes, 48 steps at interval 8, and would have to be
repeated whenever others come and go. **Not built.** A run whose passes are too slow says so by
`zenflow_wait_ms`; `deepspeed-ext tune` finds the count.

A share could move to the bit at one moment only, the end of the synchronous start, before the first
selection takes blocks out of the arena. That start is one step long unless the config
says otherwise, and eight are needed to measure.
"""


SIMULATED_TITLE = "\n## On the simulated accelerator\n"
_SIMULATED = """
`python -m tests.simulated.automatic --simulated`, {made}. Steps of an engine in the accelerator's
model of time, one rank, {layers} layers, {chunks} chunks, room for all, over a step with the same
share without link and worker. The sweep takes five shares. The choice is told link, worker, what a
chunk adds, and how much of a step is not the optimizer's, 0.89: a step reads the last update before
it hands over its gradient, so that is how long the next one may take.

With commit `24301268` the choice was told the whole step. Its shares were larger by the step's own
50 operators, a tenth of these short steps, and at a pass of 1.9 and a link of 1.5 each step waited
for 2 % of one. A run measures what is between two steps.

At a link of 1.5 up to 1 % remains (at stage 3 2 % at a share of 0.52, none at 0.5): a number that
DeepSpeed copies to the device in each step, from memory that is not page-locked, waits for the
chunk that is coming up.

{table}
"""


def draw(path: Path) -> None:
    """Steps over the worker's time, with all and with a tenth of the optimizer's memory free."""
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "automatic"  # the same picture has the same bytes
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(9, 3.6), sharey=True)
    for axis, free in zip(axes, (1.0, 0.1), strict=True):
        machines = [Machine(SHOWN_LINK, worker, free, (1.0,)) for worker in WORKERS]
        axis.plot(WORKERS, _host(machines), marker="o", label="everything on the host")
        axis.plot(WORKERS, [m.seconds(m.automatic) for m in machines], marker="o", label="chosen")
        best = [m.seconds(m.automatic) / _loss(m) for m in machines]
        axis.plot(WORKERS, best, linestyle="--", color="black", label="best of the sweep")
        axis.set(xlabel="pass, in steps", ylim=(0, None))
        axis.set_title(f"room for {free:.0%} of the optimizer", fontsize=9, loc="left")
    axes[0].set(ylabel="step, in steps without it")
    axes[0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


def _host(machines: Sequence[Machine]) -> list[float]:
    return [each.seconds(each.plan(1.0)) for each in machines]


def _loss(machine: Machine) -> float:
    return machine.loss(*(machine.plan(1.0, hide_transfers=hides) for hides in (True, False)))


def chosen(link: float, worker: float, device: float) -> tuple[float, bool]:
    """Share on the host, and whether copies run beside the step, if there is room for all.
    `device` is the part of a step that is not the optimizer's."""
    now = Machine(link, worker, 1.0, (1.0,)).plan(None)
    times = ChainTimes(device, worker, link * UP_OVER_DOWN, (link + worker) / CHUNKS)
    found = search_measured(now, [Measured.of(now, times, 2 * NUMEL * 12)])
    share = found.share if is_worth_it(now, found.share) else 1.0
    return share, found.plan.copies is Copies.BESIDE_STEP


def simulated_table() -> Iterator[str]:
    """A row for each stage and machine: an engine's steps in the model of time of the simulated
    accelerator, as chosen and over a sweep of five shares, copies beside and inside of them."""
    yield "| stage | link | worker | chosen | step | best of the sweep | its plan | ratio |"
    yield "|---|---|---|---|---|---|---|---|"
    for stage in STAGES:
        swept: dict[tuple[float, float], dict[str, float]] = {each: {} for each in SIMULATED}
        device = 1.0
        for share, hidden in itertools.product(SHARES, (True, False)):
            way = Way(stage, 1, 1, hidden, LAYERS, CHUNKS, host_share=share)
            for machine, found in zip(SIMULATED, figures(way, SIMULATED), strict=True):
                swept[machine][_named(share, hidden)] = found["step"]
                device = min(device, found["device"])
        for machine in SIMULATED:
            share, hidden = chosen(*machine, device)
            way = Way(stage, 1, 1, hidden, LAYERS, CHUNKS, host_share=share)
            step = figures(way, [machine])[0]["step"]
            best = min(swept[machine], key=swept[machine].__getitem__)
            least = swept[machine][best]
            yield (
                f"| {stage} | {machine[0]:g} | {machine[1]:g} | {_named(share, hidden)} | "
                f"{step:.3f} | {least:.3f} | {best} | {step / least:.3f} |"
            )


def _named(share: float, hidden: bool) -> str:
    return f"{share:.3g}, copies {'beside' if hidden else 'inside'}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true", help="write the page and its picture")
    parser.add_argument(
        "--simulated", action="store_true", help="steps of an engine on the simulated accelerator"
    )
    arguments = parser.parse_args()
    kept = PAGE.read_text().partition(SIMULATED_TITLE)[2] if PAGE.exists() else ""
    if arguments.simulated:
        lines = []
        for line in simulated_table():
            print(line, flush=True)
            lines.append(line)
        shown = {"layers": LAYERS, "chunks": CHUNKS, "made": made()}
        kept = _SIMULATED.format(**shown, table="\n".join(lines))
        PAGE.write_text(PAGE.read_text().partition(SIMULATED_TITLE)[0] + SIMULATED_TITLE + kept)
        return
    page = page_of(losses()) + SIMULATED_TITLE + kept
    print(page)
    if arguments.write:
        PAGE.write_text(page)
        draw(PICTURE)


if __name__ == "__main__":
    main()
