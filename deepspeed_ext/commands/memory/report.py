"""Writes plans of memory as text and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from deepspeed_ext.commands.memory.plan import PLACES, UNKNOWN, Capacity, MemoryPlan
from deepspeed_ext.commands.memory.ways import name_of
from deepspeed_ext.runtime.words import counted
from deepspeed_ext.zenflow.plan.phases import Phase
from deepspeed_ext.zenflow.plan.places import Place

__all__ = ["as_json", "as_text"]

SCHEMA = 2
_GIB, _MIB = 1 << 30, 1 << 20
_NAME_WIDTH = 36
_COLUMNS = [phase for phase in Phase if phase.is_in_every_run]
_WIDTHS = [max(11, len(phase.value)) for phase in _COLUMNS]
"""Column widths of all tables: each has as many columns as there are phases."""
_OTHERS = {Phase.LOAD: "to load a checkpoint", Phase.SLEEP: "asleep, after offload_states"}


def as_json(
    plans: Sequence[MemoryPlan], capacity: Capacity = UNKNOWN, notes: Sequence[str] = ()
) -> dict[str, Any]:
    """All sizes in bytes; the first plan is the requested one, if there is one."""
    first = plans[0]
    return {
        "schema": SCHEMA,
        "parameters": first.model.params,
        "largest_parameter": first.model.largest,
        "dtype": first.model.dtype,
        "ranks": first.ranks.count,
        "ranks_per_host": first.ranks.per_host,
        "activations_included": False,
        "notes": list(notes),
        "plans": [_plan_json(plan, capacity) for plan in plans],
    }


def _plan_json(plan: MemoryPlan, capacity: Capacity) -> dict[str, Any]:
    setup, zenflow = plan.setup, plan.zenflow
    parts = {
        place.value: {
            phase.value: {part.kind: part.nbytes for part in plan.parts[place, phase]}
            for phase in Phase
        }
        for place in PLACES
    }
    return {
        "stage": setup.stage,
        "run": name_of(setup, plan.copies),
        "zenflow": setup.zenflow and setup.zenflow.model_dump(exclude_unset=True),
        "reasons": [] if zenflow is None else [str(reason) for reason in zenflow.reasons],
        "gradient_accumulation_steps": setup.accumulation,
        "bytes_per_rank": parts,
        "page_locked_bytes_per_rank": {phase.value: plan.page_locked(phase) for phase in Phase},
        "host_bytes_per_host": {phase.value: plan.on_host(phase) for phase in Phase},
        "peak_bytes": {
            "accelerator": plan.peak(Place.ACCELERATOR),
            "host": plan.peak(Place.HOST),
            "per_host": plan.host_peak(),
        },
        "left_bytes": {place.value: nbytes for place, nbytes in capacity.left(plan).items()},
        "notes": list(plan.notes),
    }


def as_text(plans: Sequence[MemoryPlan], notes: Sequence[str], capacity: Capacity = UNKNOWN) -> str:
    """The report: a header, the first plan in detail, a table of all `plans`, and whether the first
    one fits."""
    first = plans[0]
    header = (
        f"{first.model.params:,} parameters in {first.model.dtype} (the largest has "
        f"{first.model.largest:,}), {counted(first.ranks.count, 'rank')}, "
        f"{first.ranks.per_host} per host.\n"
        "Not included: activations, which are the model's, "
        "libraries, and fragmentation of the allocator."
    )
    tables = detail_text(first, notes), neighbours_text(plans, capacity)
    return "\n\n".join([header, *tables, verdict_text(first, capacity)])


def verdict_text(plan: MemoryPlan, capacity: Capacity) -> str:
    """Whether the plan fits."""
    if capacity == UNKNOWN:
        return (
            "Does it fit? Add --gpu-gb and --host-gb: the memory of one accelerator and of one "
            "host, as numbers, or here for this machine's."
        )
    left = capacity.left(plan)
    amounts = [
        f"{abs(size) / _GIB:,.2f} GiB "
        f"{'are left on' if size >= 0 else 'are missing on'} the {place.value}"
        for place, size in left.items()
    ]
    on_top = ", before activations" if Place.ACCELERATOR in left else ""
    verdict = "It fits" if _fits(plan, capacity) == "yes" else "It does not fit"
    return f"{verdict}{on_top}: {', '.join(amounts)}."


def _fits(plan: MemoryPlan, capacity: Capacity) -> str:
    short = [place.value for place, nbytes in capacity.left(plan).items() if nbytes < 0]
    return f"no: {', '.join(short)}" if short else "yes"


def detail_text(plan: MemoryPlan, notes: Sequence[str] = ()) -> str:
    """One plan by kind and phase, per rank."""
    unit, name = _unit([plan])
    run = name_of(plan.setup, plan.copies)
    lines = [f"stage {plan.setup.stage}, {run}: {name} per rank"]
    lines.append(_row("", [phase.value for phase in _COLUMNS]))

    def total(title: str, sizes: Sequence[int]) -> None:
        lines.append(_row(f"  {title}", [_amount(nbytes, unit) for nbytes in sizes]))

    for place in PLACES:
        lines.append(place.value)
        by_phase = [
            {part.kind: part.nbytes for part in plan.parts[place, phase]} for phase in _COLUMNS
        ]
        for kind in dict.fromkeys(kind for parts in by_phase for kind in parts):
            total(kind, [parts.get(kind, 0) for parts in by_phase])
        total("total", [plan.nbytes(place, phase) for phase in _COLUMNS])
    total("of it page-locked", [plan.page_locked(phase) for phase in _COLUMNS])
    total("total of the first host", [plan.on_host(phase) for phase in _COLUMNS])
    for phase, what in _OTHERS.items():
        there, here = (_amount(plan.nbytes(place, phase), unit) for place in PLACES)
        on_host = _amount(plan.on_host(phase), unit)
        lines.append(
            f"{what}: {there} of the accelerator, {here} of the host, {on_host} of the first host"
        )
    return "\n".join([*lines, *(f"note: {note}" for note in (*plan.notes, *notes))])


def neighbours_text(plans: Sequence[MemoryPlan], capacity: Capacity = UNKNOWN) -> str:
    """One line per plan."""
    unit, name = _unit(plans)
    columns = ["accelerator", "at its peak", "host", "at its peak", "per host"]
    is_judged = capacity != UNKNOWN
    names = [f"{plan.setup.stage}, {name_of(plan.setup, plan.copies)}" for plan in plans]
    width = max(_NAME_WIDTH, *map(len, names))
    lines = [f"{name} per rank between steps and at the peak"]
    lines.append(_row("stage, run", columns, width) + ("   fits" if is_judged else ""))
    for plan, run in zip(plans, names, strict=True):
        held = [[plan.nbytes(place, Phase.BETWEEN), plan.peak(place)] for place in PLACES]
        amounts = [_amount(size, unit) for size in (*held[0], *held[1], plan.host_peak())]
        row = _row(run, amounts, width)
        lines.append(f"{row}   {_fits(plan, capacity)}" if is_judged else row)
    return "\n".join(lines)


def _unit(plans: Sequence[MemoryPlan]) -> tuple[int, str]:
    most = max(plan.peak(place) for plan in plans for place in PLACES)
    return (_GIB, "GiB") if most >= _GIB else (_MIB, "MiB")


def _amount(nbytes: int, unit: int) -> str:
    return f"{nbytes / unit:,.2f}" if nbytes else "-"


def _row(name: str, cells: Sequence[str], name_width: int = _NAME_WIDTH) -> str:
    aligned = [f"  {cell:>{width}}" for cell, width in zip(cells, _WIDTHS, strict=True)]
    return f"{name:<{name_width}}{''.join(aligned)}".rstrip()
