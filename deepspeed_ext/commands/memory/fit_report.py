"""Writes the answers of `fit` as one screen of text and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from deepspeed_ext.commands.memory.fit import Fit, config_of, suggested
from deepspeed_ext.commands.memory.parts import Capacity, Place
from deepspeed_ext.commands.memory.traffic import Machine

__all__ = ["as_json", "as_text"]

_GIB = 1 << 30
_COLUMNS = ("GPU GiB", "host GiB", "link ms", "exposed ms", "hidden from")
_NAME_WIDTH, _WIDTH = 36, 12


def as_text(name: str, found: Sequence[Fit], capacity: Capacity, machine: Machine, notes: Sequence[str] = ()) -> str:
    """The report.

    Args:
        name: the model, in a few words.
        notes: what a reader must know of the model.
    """
    first = found[0].plan
    lines = [
        f"{name}: {first.model.params:,} parameters in {first.model.dtype} on {first.ranks.count} GPU(s), "
        f"{first.ranks.per_host} per host.",
        f"Assumed: {machine.link / 1e9:g} GB/s each way between a GPU and its host, {machine.host / 1e9:g} GB/s of "
        f"host memory, {machine.flops / 1e12:g} TFLOP/s a GPU.",
        *(f"note: {note}" for note in notes),
        "",
        f"{'stage, run':<{_NAME_WIDTH}}{''.join(f'{column:>{_WIDTH}}' for column in _COLUMNS)}   fits",
        *(_line(fit) for fit in found),
        "",
        "GPU: the peak of one GPU; activations come on top. Host: the peak of all ranks of a host. Link: the longest",
        "transfer of a step, down or up. Exposed: what every step waits for. Hidden from: tokens per GPU and step from",
        "which nothing is exposed.",
        _verdict(found, capacity),
    ]
    return "\n".join(lines)


def _line(fit: Fit) -> str:
    plan, time = fit.plan, fit.time
    cells = [
        f"{plan.peak(Place.ACCELERATOR) / _GIB:,.1f}",
        f"{plan.host_peak() / _GIB:,.1f}",
        f"{time.transfer * 1e3:,.0f}" if time.transfer else "-",
        f"{time.exposed * 1e3:,.0f}" if time.exposed else "-",
        "never" if fit.tokens is None else f"{fit.tokens:,}" if fit.tokens else "-",
    ]
    verdict = "" if not fit.left else "yes" if not fit.short else f"no: {_missing(fit)}"
    name = f"{plan.setup.stage}, {fit.name}"
    return f"{name:<{_NAME_WIDTH}}{''.join(f'{cell:>{_WIDTH}}' for cell in cells)}   {verdict}".rstrip()


def _missing(fit: Fit) -> str:
    names = {Place.ACCELERATOR: "GPU", Place.HOST: "host"}
    return ", ".join(f"{names[place]} {-left / _GIB:,.1f} GiB short" for place, left in fit.left.items() if left < 0)


def _verdict(found: Sequence[Fit], capacity: Capacity) -> str:
    if capacity.accelerator is None or capacity.host is None:
        return "Does it fit? Add --gpu-gb and --host-gb, as makers write them (80, 512), or here for this machine's."
    fit = suggested(found)
    if fit is None:
        return "Nothing fits. More GPUs divide what is held on each; more hosts also what each host holds."
    left = fit.left[Place.ACCELERATOR] / _GIB
    return f"Suggested: stage {fit.plan.setup.stage}, {fit.name}; {left:,.1f} GiB of a GPU are left for activations."


def as_json(found: Sequence[Fit], machine: Machine) -> dict[str, Any]:
    """All ways: bytes, seconds, tokens and the config to copy."""
    best = suggested(found)
    return {
        "assumed": {
            "link_bytes_per_second": machine.link,
            "host_bytes_per_second": machine.host,
            "gpu_flop_per_second": machine.flops,
        },
        "suggested": None if best is None else found.index(best),
        "ways": [
            {
                "stage": fit.plan.setup.stage,
                "run": fit.name,
                "fits": None if not fit.left else not fit.short,
                "limits": fit.short,
                "peak_bytes": {
                    "accelerator": fit.plan.peak(Place.ACCELERATOR),
                    "per_host": fit.plan.host_peak(),
                },
                "left_bytes": {place.value: nbytes for place, nbytes in fit.left.items()},
                "transfer_seconds": fit.time.transfer,
                "host_pass_seconds": fit.time.host,
                "exposed_seconds": fit.time.exposed,
                "tokens_per_gpu_to_hide_all": fit.tokens,
                "config": config_of(fit),
            }
            for fit in found
        ],
    }
