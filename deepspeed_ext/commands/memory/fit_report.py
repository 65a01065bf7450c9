"""Writes the answers of `fit` as text, the answer first, and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from deepspeed_ext.commands.memory.activations import TOKENS, typical_activations
from deepspeed_ext.commands.memory.fit import (
    GPU_RESERVE,
    HOST_RESERVE,
    RANK_RESERVE,
    Fit,
    Question,
    best_of_kinds,
    faster,
    largest,
    nearest,
    suggested,
)
from deepspeed_ext.commands.memory.fit_config import config_of
from deepspeed_ext.commands.memory.ways import inexactness, name_of
from deepspeed_ext.runtime.words import counted
from deepspeed_ext.zenflow.plan.places import Place

__all__ = ["as_json", "as_text"]

_GIB = 1 << 30
_COLUMNS = ("GPU GiB", "host GiB", "exposed ms", "step ms", "free above")
_WIDTH = 13
_NAMES = {Place.ACCELERATOR: "GPU", Place.HOST: "host"}


def as_text(
    name: str,
    question: Question,
    found: Sequence[Fit],
    notes: Sequence[str] = (),
    *,
    all_ways: bool = False,
) -> str:
    """The report.

    Args:
        name: the model, in a few words.
        found: every way.
        notes: remarks on the model.
        all_ways: a line for each way, instead of one for the best of each kind.
    """
    model, ranks, machine = question.model, question.ranks, question.machine
    shown = list(found) if all_ways else best_of_kinds(found)
    width = max(len(_row_name(fit)) for fit in shown)
    lines = [
        answer(question, found),
        "",
        f"{name}: {model.params:,} parameters in {model.dtype} on {counted(ranks.count, 'GPU')}, "
        f"{ranks.per_host} per host.",
        f"Assumed: {machine.link / 1e9:g} GB/s each way between a GPU and its host, "
        f"{machine.host / 1e9:g} GB/s of "
        f"host memory, {machine.flops / 1e12:g} TFLOP/s per GPU.",
        f"Kept free: {GPU_RESERVE / _GIB:g} GiB of a GPU, {HOST_RESERVE / _GIB:g} GiB of a host "
        f"and {RANK_RESERVE / _GIB:g} for each of its ranks. Counted for activations: "
        f"{typical_activations(question.active) / _GIB:.1f} GiB.",
        *(f"note: {note}" for note in notes),
        "",
        f"{'stage, run':<{width}}{''.join(f'{column:>{_WIDTH}}' for column in _COLUMNS)}   fits",
        *(_line(fit, width) for fit in shown),
        "",
        "GPU: peak of one GPU without activations. Host: peak of all ranks of a host. Exposed: "
        "what",
        f"every step waits for. Step: with forward and backward of {question.tokens:,} tokens per "
        "GPU. Free",
        "above: tokens per GPU and step above which the optimizer adds no time. Activations: of "
        "one",
        f"sequence of {TOKENS:,} tokens, recomputed. Times are arithmetic.",
    ]
    if not all_ways:
        lines.append(f"Each line is the best of its kind; --all shows all {len(found)} ways.")
    return "\n".join(lines)


def answer(question: Question, found: Sequence[Fit]) -> str:
    """Whether the model fits, and how, in one line; a second line if a less exact way is clearly
    faster."""
    capacity = question.capacity
    if capacity.accelerator is None:
        return (
            "Does it fit? Add --gpu-gb and --host-gb, as vendors write them (80, 512), or here for "
            "this machine's."
        )
    best = suggested(found)
    if best is None:
        return _miss(question, found)
    unknown = "" if capacity.host is not None else " The host's memory is not known: add --host-gb."
    lines = [f"It fits: {_described(best)}; {_left(best)}.{unknown}"]
    if (other := faster(found)) is not None:
        lines.append(f"Faster, but less exact: {_described(other)}.")
    return "\n".join(lines)


def _described(fit: Fit) -> str:
    return f"{fit.name}{_exactness(fit)}, {fit.step_seconds:,.2f} s a step"


def _left(fit: Fit) -> str:
    room = 0 if fit.room is None else fit.room
    host = fit.left.get(Place.HOST)
    of_host = "" if host is None else f", {host / _GIB:,.1f} GiB of the host"
    return f"left: {room / _GIB:,.1f} GiB of a GPU for activations{of_host}"


def _miss(question: Question, found: Sequence[Fit]) -> str:
    near, most = nearest(found), largest(question, found)
    text = f"It does not fit. Nearest: {near.name}, {_missing(near)}."
    if most is None:
        return f"{text} With more GPUs each holds less; with more hosts each host does, too."
    params, how = most
    return (
        f"{text} The largest model that fits has about {_billions(params)} parameters: "
        f"{how.name}{_exactness(how)}."
    )


def _exactness(fit: Fit) -> str:
    if fit.setup.on_accelerator:
        return " (no offload is needed)"
    return " (not exact)" if inexactness(fit.setup) else ""


def _billions(params: int) -> str:
    return f"{params / 1e9:,.1f} billion" if params >= 10**8 else f"{params / 1e6:,.1f} million"


def _line(fit: Fit, width: int) -> str:
    plan, time = fit.plan, fit.time
    cells = [
        f"{plan.peak(Place.ACCELERATOR) / _GIB:,.1f}",
        f"{plan.host_peak() / _GIB:,.1f}",
        f"{time.exposed * 1e3:,.0f}" if time.exposed else "-",
        f"{fit.step_seconds * 1e3:,.0f}",
        "never" if fit.tokens is None else f"{fit.tokens:,}" if fit.tokens else "-",
    ]
    verdict = "" if not fit.left else "yes" if not fit.short else f"no: {_missing(fit)}"
    return (
        f"{_row_name(fit):<{width}}{''.join(f'{cell:>{_WIDTH}}' for cell in cells)}   {verdict}"
    ).rstrip()


def _row_name(fit: Fit) -> str:
    return f"{fit.setup.stage}, {name_of(fit.setup, fit.plan.copies)}"


def _missing(fit: Fit) -> str:
    """What is missing, rounded up, so that it is never 0."""
    tenths = {place: -(10 * left // _GIB) for place, left in fit.left.items() if left < 0}
    return (
        f"{', '.join(f'{_NAMES[place]} {tenth / 10:,.1f}' for place, tenth in tenths.items())} "
        f"GiB short"
    )


def as_json(question: Question, found: Sequence[Fit]) -> dict[str, Any]:
    """All ways: bytes, seconds, tokens and the config to copy."""
    best, machine = suggested(found), question.machine
    return {
        "assumed": {
            "link_bytes_per_second": machine.link,
            "host_bytes_per_second": machine.host,
            "gpu_flop_per_second": machine.flops,
            "tokens_per_gpu_and_step": question.tokens,
            "activation_bytes": typical_activations(question.active),
        },
        "reserved_bytes": {
            "accelerator": GPU_RESERVE,
            "host": HOST_RESERVE,
            "host_per_rank": RANK_RESERVE,
        },
        "answer": answer(question, found),
        "suggested": None if best is None else found.index(best),
        "ways": [_way(question, fit) for fit in found],
    }


def _way(question: Question, fit: Fit) -> dict[str, Any]:
    return {
        "stage": fit.setup.stage,
        "run": name_of(fit.setup, fit.plan.copies),
        "exact": not inexactness(fit.setup),
        "fits": None if not fit.left else not fit.short,
        "limits": [place.value for place in fit.short],
        "peak_bytes": {
            "accelerator": fit.plan.peak(Place.ACCELERATOR),
            "per_host": fit.plan.host_peak(),
        },
        "room_for_activations_bytes": fit.room,
        "left_bytes": {place.value: nbytes for place, nbytes in fit.left.items()},
        "transfer_seconds": fit.time.transfer,
        "host_pass_seconds": fit.time.host,
        "exposed_seconds": fit.time.exposed,
        "step_seconds": fit.step_seconds,
        "tokens_per_gpu_to_hide_all": fit.tokens,
        "config": config_of(fit.setup, question.model.dtype),
    }
