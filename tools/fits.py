"""Writes the tables of docs/memory.md from the plan of memory: the largest model on machines that
people own, models by name on cards by name with their configs, and the speeds that are assumed.

    python -m tools.fits

Nothing is measured. Bytes and seconds come from `deepspeed_ext.commands.memory`, as `deepspeed-ext
plan --memory` prints them.
"""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from deepspeed_ext.commands.memory.fit import GPU_RESERVE, Question, fits, suggested
from deepspeed_ext.commands.memory.model import GIB, known, machine_of, read_shape, typical
from deepspeed_ext.commands.memory.setup import Model, Setup, sections_of, ways

__all__ = ["OWNED", "PAGE", "Owned", "flash_largest", "largest", "page", "row", "table"]

PAGE = Path(__file__).resolve().parent.parent / "docs" / "memory.md"
FLASH_BYTES = 7
"""Of FlashOptim's AdamW on the GPU: bf16 weights, 8 bits of correction, two moments of 8 bits, and
the gradient."""
NAMED_CARDS, NAMED_HOST_GIB = ("rtx4090", "rtx5090", "l40s", "h100"), (64, 96, 128, 256)
LARGEST_TRIED = 400 * 10**9


@dataclass(frozen=True)
class Owned:
    """A machine that people own: a name of a card, how many of it, and GiB of common hosts."""

    card: str
    gpus: int
    host_gib: tuple[int, ...]

    @property
    def name(self) -> str:
        name = known()["cards"][self.card]["name"]
        return name if self.gpus == 1 else f"{self.gpus} x {name}"


OWNED = (
    Owned("rtx4090", 1, (64, 96, 128)),
    Owned("rtx5090", 1, (64, 128)),
    Owned("l40s", 1, (256,)),
    Owned("h100", 1, (256,)),
    Owned("h100", 8, (1024,)),
)


def groups() -> dict[str, list[Setup]]:
    """The columns: ZeRO-Offload, and ours by the dtype of its moments, each with both rules, at
    both stages and with weights on either side."""
    every = [*ways(), *ways(-(-Question.tokens // Question.sequence))]
    found = {"ZeRO-Offload": [setup for setup in every if setup.offload]}
    for dtype, moments in known()["moments"].items():
        ours = [each for each in every if each.zenflow and each.zenflow.state_dtype == dtype]
        found[f"ours, {moments['name']}"] = ours
    return found


def question(machine: Owned, host_gib: int, params: int) -> Question:
    """What is asked of a machine: a typical model of this size, with one sequence."""
    speeds = machine_of(machine.gpus, machine.gpus, machine.card, host_bytes=host_gib * GIB)
    shape = typical(params)
    return Question(shape, shape.model(), speeds)


@functools.cache
def largest(name: str, machine: Owned, host_gib: int) -> int:
    """Parameters of the largest typical model in a group of ways, to two digits; 0: none."""
    setups = groups()[name]

    def trains(params: int) -> bool:
        asked = question(machine, host_gib, params)
        model = Model(params, min(params, asked.shape.largest))
        return suggested(fits(replace(asked, model=model), setups)) is not None

    high = typical(LARGEST_TRIED).params
    low = high // 10**6
    if not trains(low):
        return 0
    while high - low > max(1, low // 200):
        middle = (low + high) // 2 if high < 4 * low else math.isqrt(low * high)
        low, high = (middle, high) if trains(middle) else (low, middle)
    digits = max(0, len(str(low)) - 2)
    return low // 10**digits * 10**digits


def flash_largest(machine: Owned) -> int:
    """Parameters of the largest model that FlashOptim's AdamW trains, on GPUs alone: each holds its
    part (FSDP2) and two layers that are gathered."""
    low, high = 1, LARGEST_TRIED
    while high - low > 10**7:
        middle = (low + high) // 2
        asked = question(machine, 0, middle)
        gathered = 2 * 2 * 12 * asked.shape.width**2 if machine.gpus > 1 else 0
        needed = (
            FLASH_BYTES * middle // machine.gpus + gathered + asked.activations(asked.micro_steps)
        )
        fitting = needed + GPU_RESERVE <= (asked.machine.gpu_bytes or 0)
        low, high = (middle, high) if fitting else (low, middle)
    return low


def billions(params: int) -> str:
    number = params / 1e9
    return "-" if not params else f"{number:.1f}" if number < 10 else f"{number:.0f}"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def row(machine: Owned, host_gib: int) -> list[str]:
    """The billions of parameters of each group, and of FlashOptim."""
    found = [largest(name, machine, host_gib) for name in groups()]
    return [billions(params) for params in (*found, flash_largest(machine))]


def owned_table() -> str:
    rows = [
        [machine.name, f"{host:,} GB", *row(machine, host)]
        for machine in OWNED
        for host in machine.host_gib
    ]
    return table(["machine", "host", *groups(), "FlashOptim"], rows)


@functools.cache
def named(name: str, card: str, host_gib: int) -> tuple[str, str]:
    """How a model by name trains on one card: the ``zero_optimization`` to write, and seconds of a
    step, with a star if only a fused loss fits; empty: it does not."""
    shape, _ = read_shape(name)
    asked = question(Owned(card, 1, ()), host_gib, shape.params)
    asked = replace(asked, shape=shape, model=shape.model())
    for fused in (False, True):
        best = suggested(fits(replace(asked, fused_loss=fused)))
        if best is not None:
            section = json.dumps(sections_of(best.setup), separators=(",", ":"))[1:-1]
            return section, f"{best.seconds:.1f}{'*' * fused}"
    return "", ""


def models_table() -> str:
    """A row for each card and model; a letter of a cell names a config of the second table."""
    letters: dict[str, str] = {}
    rows = []
    for card in NAMED_CARDS:
        for name in known()["models"]:
            cells = []
            for host in NAMED_HOST_GIB:
                section, seconds = named(name, card, host)
                if section and section not in letters:
                    letters[section] = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"[len(letters)]
                cells.append(f"{seconds}<sup>{letters[section]}</sup>" if section else "-")
            rows.append([f"`{card}`", name, *cells])
    head = ["card", "model", *(f"{host}" for host in NAMED_HOST_GIB)]
    configs = [[letter, f"`{section}`"] for section, letter in letters.items()]
    return f"{table(head, rows)}\n{table(['', 'config'], configs)}"


def speeds_table() -> str:
    cards = [
        [
            f"`{name}`",
            f"{card['gib']} GB, {card['tflops']} TFLOP/s, link {card['link_gbps']} GB/s",
            card["source"],
        ]
        for name, card in known()["cards"].items()
    ]
    hosts = [
        [
            f"`{name}`",
            f"{host['gbps']} GB/s, {host['of_rank_gbps']} of it for one rank",
            f"{host['name']}: {host['source']}",
        ]
        for name, host in known()["hosts"].items()
    ]
    return table(["card or host", "assumed", "from"], [*cards, *hosts])


def page() -> str:
    """docs/memory.md with all tables between their markers."""
    text = PAGE.read_text()
    tables = {"owned": owned_table, "models": models_table, "speeds": speeds_table}
    for name, made in tables.items():
        mark = f"<!-- {name}: written by `make docs` -->"
        pattern = re.compile(rf"{re.escape(mark)}\n.*?(?=\n\n[^|]|\Z)", re.DOTALL)
        assert len(pattern.findall(text)) == 1, f"{PAGE.name} has no place for the table {name}"
        text = pattern.sub(f"{mark}\n{made().rstrip()}", text)
    return text


if __name__ == "__main__":
    PAGE.write_text(page())
