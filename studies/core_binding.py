"""Why is binding at launch faster than binding in code? One mechanism at a time.

    python -m studies.core_binding [--ranks 2] [--rounds 5] [--steps 20] [--millions 8]

Each rank is a process that takes offloaded steps: forward and backward of linear layers on the
accelerator (or the CPU), gradients to the host, torch's fused AdamW there. The ranks of a way run
at once, on disjoint cores of this host's plan; the ways take turns, A B C A B C..., with fresh
processes. A row is the median over turns of the slowest rank's median step, its ratio to "unbound",
and the threads of rank 0 that may run outside the rank's cores.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass

from deepspeed_ext.cores.plan import PlanRequest, RankPlan, plan_host, read_host

WIDTH, WARM_UP = 1024, 3


@dataclass(frozen=True)
class Way:
    """How a rank gets to its cores.

    Attributes:
        at_launch: by taskset and OMP_NUM_THREADS, before Python starts.
        masks: set in code once torch's threads exist: of the main thread only, as DeepSpeed
            0.19.8 does, or of every thread.
        pool: resize the OpenMP pools to the number of cores, too.
        early: before the tensors exist; otherwise after the first step.
    """

    at_launch: bool = False
    masks: str = ""
    pool: bool = False
    early: bool = False


WAYS = {
    "unbound": Way(),
    "pool resized, no masks": Way(pool=True),
    "main thread (DeepSpeed's call)": Way(masks="main"),
    "main thread, pool resized": Way(masks="main", pool=True),
    "all threads": Way(masks="all"),
    "all threads, pool resized": Way(masks="all", pool=True),
    "the same before tensors exist (ours)": Way(masks="all", pool=True, early=True),
    "at launch": Way(at_launch=True),
}


def bind(way: Way, cpus: list[int], threads: int) -> None:
    """Bind this process in code."""
    from deepspeed_ext.cores.binding import set_threads
    from deepspeed_ext.cores.host import confine

    if way.masks == "main":
        os.sched_setaffinity(os.getpid(), cpus)
    elif way.masks == "all":
        confine(cpus)
    if way.pool:
        set_threads(threads)


def rank(way: Way, cpus: list[int], threads: int, steps: int, millions: float) -> None:
    """Take the steps, starting when a line arrives; print their median and the stray threads."""
    import torch

    from deepspeed_ext.cores.host import outside

    torch.zeros(1 << 22).add_(1)  # starts torch's pool
    if way.early:
        bind(way, cpus, threads)
    device = torch.accelerator.current_accelerator() or torch.device("cpu")
    layers = max(1, round(millions * 1e6 / WIDTH**2))
    model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(layers))).to(device)
    master = [torch.nn.Parameter(p.detach().cpu().clone()) for p in model.parameters()]
    optimizer = torch.optim.AdamW(master, fused=True)
    batch = torch.randn(32, WIDTH, device=device)

    def step() -> None:
        model(batch).square().mean().backward()
        for parameter, copy in zip(model.parameters(), master, strict=True):
            assert parameter.grad is not None
            copy.grad, parameter.grad = parameter.grad.cpu(), None
        optimizer.step()
        with torch.no_grad():
            for parameter, copy in zip(model.parameters(), master, strict=True):
                parameter.copy_(copy)

    step()
    if not way.early:
        bind(way, cpus, threads)
    for _ in range(WARM_UP):
        step()
    print("ready", flush=True)
    sys.stdin.readline()
    seconds = []
    for _ in range(steps):
        begin = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - begin)
    print(json.dumps([statistics.median(seconds), len(outside(cpus))]), flush=True)


def turn(name: str, plans: tuple[RankPlan, ...], words: list[str]) -> tuple[float, int]:
    """One turn of a way: (ms of the slowest rank's median step, stray threads of rank 0)."""
    ranks = []
    for plan in plans:
        cpus, environment = ",".join(map(str, plan.pytorch)), dict(os.environ)
        command = [sys.executable, "-m", "studies.core_binding", "--way", name, "--cpus", cpus]
        command += ["--threads", str(plan.pytorch_threads), *words]
        if WAYS[name].at_launch:
            environment["OMP_NUM_THREADS"] = str(plan.pytorch_threads)
            command = ["taskset", "-c", cpus, *command]
        pipe = subprocess.PIPE
        ranks.append(subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment))
    for process in ranks:
        assert process.stdout is not None
        while (line := process.stdout.readline()) not in ("", "ready\n"):
            pass  # DeepSpeed's log
        if not line:
            raise RuntimeError(f"a rank of {name!r} has ended")
    for process in ranks:  # at once: each has taken its warm-up
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    answers = [
        json.loads(process.communicate(timeout=600)[0].splitlines()[-1]) for process in ranks
    ]
    return 1e3 * max(seconds for seconds, _ in answers), answers[0][1]


def main() -> None:
    """Measure all ways, or be a rank of one."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=20, help="of a turn")
    parser.add_argument("--millions", type=float, default=8, help="million parameters")
    for word in ("--way", "--cpus", "--threads"):
        parser.add_argument(word, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.way:
        cpus = [int(cpu) for cpu in args.cpus.split(",")]
        rank(WAYS[args.way], cpus, int(args.threads), args.steps, args.millions)
        return
    topology, ranks, _ = read_host("/", args.ranks)
    plans = plan_host(topology, ranks, PlanRequest(separate=False)).ranks
    words = ["--steps", str(args.steps), "--millions", str(args.millions)]
    taken = dict[str, list[tuple[float, int]]]()
    for _ in range(args.rounds):
        for name in WAYS:
            taken.setdefault(name, []).append(turn(name, plans, words))
    medians = {name: statistics.median(ms for ms, _ in turns) for name, turns in taken.items()}
    print(f"{'way':38} {'step ms':>8} {'ratio':>6} {'stray threads':>14}")
    for name, ms in medians.items():
        print(f"{name:38} {ms:8.1f} {ms / medians['unbound']:6.2f} {taken[name][-1][1]:14}")


if __name__ == "__main__":
    main()
