"""The parts of `make bench`: all that a machine without an accelerator can measure."""

from __future__ import annotations

import shlex

from tests.perf.part import Part

LIMIT_OVER_USUAL = 5
"""A part may take this many times as long as on two quiet cores, and is ended then."""


def _part(
    name: str, module: str, real: str, toy: str, usual: float, result: str, toy_result: str = ""
) -> Part:
    limit = max(120.0, LIMIT_OVER_USUAL * usual)
    words, toy_words = tuple(shlex.split(real)), tuple(shlex.split(toy))
    return Part(name, module, words, toy_words, limit, result, toy_result or result, usual)


def parts() -> list[Part]:
    """All of them; `usual` are seconds on two quiet cores."""
    return [*_starts(), *_gathers(), *_steps(), *_of_the_optimizer(), *_trainings_and_plans()]


def _starts() -> list[Part]:
    common = "--ranks 2 --stages 1 2 --offload no yes"
    return [
        # A lock that a killed process has left would
        # stop all that loads operators; this removes it.
        _part("operators", "tools.build_operators", "", "", 10, ""),
        _part(
            "startup",
            "tests.perf.bench_startup",
            f"{common} --millions 64 --repeats 5",
            f"{common} --millions 1 --repeats 1",
            180,
            "startup",
        ),
    ]


def _gathers() -> list[Part]:
    return [
        _part(
            "gather/small",
            "tests.perf.bench_gather",
            "--ranks 2 3 --sizes tiny small medium --repeats 12 --steps 1",
            "--ranks 2 --sizes tiny --repeats 1 --steps 1",
            120,
            "gather",
        ),
        _part(
            "gather/large",
            "tests.perf.bench_gather",
            "--ranks 2 --sizes large --repeats 4 --steps 1",
            "--ranks 2 --sizes tiny --repeats 1 --steps 1",
            75,
            "gather_large",
            "gather",
        ),
    ]


def _steps() -> list[Part]:
    ways = "'ZeRO, no overflow check' ours 'ours, exact, stage 3' ZeRO-Offload"
    return [
        _part(
            "step",
            "tests.perf.bench_decoder",
            f"--ways {ways} --model 7m --batches 4x128 --turns 3 --steps 6 --name decoder_cpu",
            f"--ways {ways} --model toy --batches 1x32 --turns 1 --steps 2 --name decoder_cpu",
            120,
            "decoder_cpu",
        )
    ]


def _of_the_optimizer() -> list[Part]:
    return [
        _part(
            "cpu-adam",
            "tests.perf.bench_cpu_adam",
            "--deepspeed --repeats 5 --numel 16777216 62219904 50000017",
            "--deepspeed --repeats 1 --numel 65536 50017",
            50,
            "cpu_adam",
        )
    ]


def _trainings_and_plans() -> list[Part]:
    upstream = "'upstream ZenFlow, sequential' 'upstream ZenFlow, overlapped'"
    rows = f"--rows AdamW {upstream} predictive --rates 0.001"
    runs = "ZeRO ZeRO-Offload predictive 'selective, interval 2'"
    return [
        _part(
            "convergence",
            "tests.perf.bench_convergence",
            f"{rows} --seeds 1 --steps 150",
            "--rows AdamW --quick",
            330,
            "convergence_losses",
            "convergence_quick_losses",
        ),
        _part(
            "memory-plan",
            "tests.perf.memory_plan",
            f"--stages 2 3 --accumulation 1 --ways {runs}",
            "--stages 2 --accumulation 1 --ways ZeRO",
            55,
            "memory_plan",
        ),
    ]
