"""Reads published.json: what a prediction may use, and the published numbers that it is compared
with."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from deepspeed_ext.commands.memory.setup import Model, Ranks
from deepspeed_ext.commands.memory.traffic import Machine

__all__ = ["Inputs", "Quantity", "Row", "System", "Unused", "read"]

FILE = Path(__file__).with_name("published.json")

Quantity = Literal["step", "pass", "exposed", "times ZeRO-Offload", "TFLOPS"]
Schedule = Literal["package", "zenflow", "behind backward", "serial", "pipelined"]


@dataclass(frozen=True)
class System:
    """How a system offloads, as its source describes it.

    Attributes:
        schedule: which part follows which, see `schedules`.
        why: where that and the bytes come from.
        down, up: bytes per parameter over the link; of "package" and "zenflow" computed elsewhere.
        passed: bytes per parameter that the pass and the transfers move in host memory.
    """

    schedule: Schedule
    why: str
    down: float = 0.0
    up: float = 0.0
    passed: float = 0.0


@dataclass(frozen=True)
class Row:
    """A published number and the conditions of its run.

    Attributes:
        name: model and conditions, in a few words.
        system, machine: keys of `Inputs`.
        source: URL.
        params: parameters.
        gpus, per_host: GPUs, and how many of them share a host.
        published: seconds, or what `quantity` says.
        quantity: what was published: seconds of a step, of the pass alone or of the exposed part of
            the optimizer; a ratio of speeds; TFLOPS of a GPU.
        base: seconds of the same step without offload; None: computed from `tokens`.
        tokens: tokens of a GPU in a step, if there is no `base`.
        share: of the parameters, offloaded.
        recompute: activations are recomputed in backward.
        weights_on_host: weights are offloaded, too.
        note: what else a reader should know.
    """

    name: str
    system: str
    source: str
    machine: str
    params: float
    gpus: int
    per_host: int
    published: float
    quantity: Quantity
    base: float | None = None
    tokens: int = 0
    share: float = 1.0
    recompute: bool = False
    weights_on_host: bool = False
    note: str = ""

    @property
    def model(self) -> Model:
        """Its parameters, in 16 bit. The largest one plays no role for times."""
        return Model(round(self.params), 1, "bfloat16")

    @property
    def ranks(self) -> Ranks:
        return Ranks(self.gpus, self.per_host)


@dataclass(frozen=True)
class Unused:
    """A published number that cannot be predicted from what its source says."""

    name: str
    source: str
    why: str


@dataclass(frozen=True)
class Inputs:
    """The file.

    Attributes:
        machines: speeds with the rules' shares applied, by name.
        hardware: what each machine is and where its speeds come from.
        systems: by name.
        rows: in the order of the file.
        unused: published numbers without a prediction.
        forward_share: of a step without offload, in forward; with and without recomputed
            activations.
        rules: the file's section of that name.
    """

    machines: dict[str, Machine]
    hardware: dict[str, dict[str, Any]]
    systems: dict[str, System]
    rows: list[Row]
    unused: list[Unused]
    forward_share: dict[bool, float]
    rules: dict[str, Any] = field(repr=False)


def read(path: Path = FILE) -> Inputs:
    """Read the file.

    Raises:
        KeyError: a row names a machine or a system that is not there.
        TypeError: an entry has a field that is not known, or lacks one.
    """
    found = json.loads(path.read_text())
    rules, hardware = found["rules"], found["machines"]
    machines = {
        name: Machine(
            speeds["link"],
            speeds["host_peak"] * rules["host_share_of_peak"],
            speeds["gpu_peak"] * rules["gpu_share_of_peak"],
        )
        for name, speeds in hardware.items()
    }
    systems = {name: System(**entry) for name, entry in found["systems"].items()}
    rows = [Row(**entry) for entry in found["rows"]]
    for row in rows:
        machines[row.machine], systems[row.system]
    share = rules["forward_share"]
    return Inputs(
        machines,
        hardware,
        systems,
        rows,
        [Unused(**entry) for entry in found["unused"]],
        {False: share["plain"], True: share["recompute"]},
        rules,
    )
