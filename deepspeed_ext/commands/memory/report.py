"""Writes plans of memory as text and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from deepspeed_ext.commands.memory.parts import Capacity, MemoryPlan, Place
from deepspeed_ext.zenflow.plan.held import Phase

__all__ = ["as_json", "as_text"]

SCHEMA = 1
UNKNOWN = Capacity()
_GIB, _MIB = 1 << 30, 1 << 20
_NAME_WIDTH = 36
_WIDTHS = [max(11, len(phase.value)) for phase in Phase]
"""Of the columns of all tables, which have one for each phase or as many others."""


def as_json(plans: Sequence[MemoryPlan], capacity: Capacity = UNKNOWN, notes: Sequence[str] = ()) -> dict[str, Any]:
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
    parts = {
        place.value: {phase.value: {part.kind: part.nbytes for part in plan.parts[place, phase]} for phase in Phase}
        for place in Place
    }
    return {
        "stage": plan.setup.stage,
        "run": plan.setup.name,
        "zenflow": None if plan.setup.zenflow is None else plan.setup.zenflow.model_dump(exclude_unset=True),
        "gradient_accumulation_steps": plan.setup.accumulation,
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
    """The report: a header, the first plan in detail, a table of all `plans`, and whether the first one fits."""
    first = plans[0]
    header = (
        f"{first.model.params:,} parameters in {first.model.dtype} (the largest has {first.model.largest:,}), "
        f"{first.ranks.count} rank(s), {first.ranks.per_host} per host.\n"
        "Not included: activations, which are the model's, libraries, and fragmentation of the allocator."
    )
    return "\n\n".join(
        [header, detail_text(first, notes), neighbours_text(plans, capacity), verdict_text(first, capacity)]
    )


def verdict_text(plan: MemoryPlan, capacity: Capacity) -> str:
    """Whether the plan fits."""
    if capacity == UNKNOWN:
        return (
            "Does it fit? Add --gpu-gb and --host-gb: the memory of one accelerator and of one host, as numbers, or "
            "here for this machine's."
        )
    left = capacity.left(plan)
    amounts = [
        f"{abs(nbytes) / _GIB:,.2f} GiB {'are left on' if nbytes >= 0 else 'are missing on'} the {place.value}"
        for place, nbytes in left.items()
    ]
    on_top = ", before activations" if Place.ACCELERATOR in left else ""
    return f"{'It fits' if _fits(plan, capacity) == 'yes' else 'It does not fit'}{on_top}: {', '.join(amounts)}."


def _fits(plan: MemoryPlan, capacity: Capacity) -> str:
    short = [place.value for place, nbytes in capacity.left(plan).items() if nbytes < 0]
    return f"no: {', '.join(short)}" if short else "yes"


def detail_text(plan: MemoryPlan, notes: Sequence[str] = ()) -> str:
    """One plan by kind and phase, per rank."""
    unit, name = _unit([plan])
    title = f"stage {plan.setup.stage}, {plan.setup.name}: {name} per rank"
    lines = [title, _row("", [phase.value for phase in Phase])]
    for place in Place:
        lines.append(place.value)
        by_phase = [{part.kind: part.nbytes for part in plan.parts[place, phase]} for phase in Phase]
        kinds = dict.fromkeys(kind for parts in by_phase for kind in parts)
        lines += [_row(f"  {kind}", [_amount(parts.get(kind, 0), unit) for parts in by_phase]) for kind in kinds]
        lines.append(_row("  total", [_amount(plan.nbytes(place, phase), unit) for phase in Phase]))
    lines.append(_row("  of it page-locked", [_amount(plan.page_locked(phase), unit) for phase in Phase]))
    lines.append(_row("  total of the first host", [_amount(plan.on_host(phase), unit) for phase in Phase]))
    return "\n".join([*lines, *(f"note: {note}" for note in (*plan.notes, *notes))])


def neighbours_text(plans: Sequence[MemoryPlan], capacity: Capacity = UNKNOWN) -> str:
    """One line per plan."""
    unit, name = _unit(plans)
    columns = ["accelerator", "at its peak", "host", "at its peak", "per host"]
    is_judged = capacity != UNKNOWN
    fits = "   fits" if is_judged else ""
    names = [f"{plan.setup.stage}, {plan.setup.name}" for plan in plans]
    width = max(_NAME_WIDTH, *map(len, names))
    lines = [f"{name} per rank between steps and at the peak", _row("stage, run", columns, width) + fits]
    for plan, run in zip(plans, names, strict=True):
        amounts = [
            plan.nbytes(Place.ACCELERATOR, Phase.BETWEEN),
            plan.peak(Place.ACCELERATOR),
            plan.nbytes(Place.HOST, Phase.BETWEEN),
            plan.peak(Place.HOST),
            plan.host_peak(),
        ]
        row = _row(run, [_amount(nbytes, unit) for nbytes in amounts], width)
        lines.append(f"{row}   {_fits(plan, capacity)}" if is_judged else row)
    return "\n".join(lines)


def _unit(plans: Sequence[MemoryPlan]) -> tuple[int, str]:
    most = max(plan.peak(place) for plan in plans for place in Place)
    return (_GIB, "GiB") if most >= _GIB else (_MIB, "MiB")


def _amount(nbytes: int, unit: int) -> str:
    return f"{nbytes / unit:,.2f}" if nbytes else "-"


def _row(name: str, cells: Sequence[str], name_width: int = _NAME_WIDTH) -> str:
    aligned = [f"  {cell:>{width}}" for cell, width in zip(cells, _WIDTHS, strict=True)]
    return f"{name:<{name_width}}{''.join(aligned)}".rstrip()
