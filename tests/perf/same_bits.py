"""Whether this checkout trains as an earlier commit did, to the bit: losses and checkpoints.

    python -m tests.perf.same_bits --before COMMIT [--only TEXT]

Every variant trains a small model for 60 steps with the earlier commit and with this checkout,
from the same seeds, and saves after 30 and 60. Then again with torch's square root here:
since `kernels.root` roots are the nearest numbers, which torch's on the CPU are not, so overlapped
runs differ in last bits for that reason; what else differs shows here. Last, this checkout loads
what the earlier commit saved after 30 steps, and has to come to the same losses and checkpoint.

Choices that are made by measuring are off on both sides: fields of that kind are given, and
`autotune`, which the earlier commit may not have, is false. Tests' helpers and the simulated
accelerator are those of this checkout for both: a device is not what is compared.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tests.perf.compare_commits import ROOT, checkout
from tests.support.zenflow import zenflow_config

STEPS, MIDDLE = 60, 30
PREDICTIVE = {"update_rule": "predictive", "update_interval": 1, "full_warm_up_rounds": 2}
SELECTIVE = {
    "update_rule": "selective",
    "topk_ratio": 0.1,
    "select_interval": 8,
    "update_interval": 2,
    "overlap_step": True,
    "full_warm_up_rounds": 2,
}
SYNCHRONOUS = {"overlap_step": False}
LION = {"optimizer": {"type": "Lion", "params": {"lr": 1e-4, "weight_decay": 0.1}}}
SHARE = {"zero_optimization": {"offload_optimizer": {"device": "cpu", "ratio": 0.4}}}
WEIGHTS_ON_HOST = {
    "zero_optimization": {"offload_param": {"device": "cpu", "pin_memory": False}},
}
OVERFLOWS = {"fp16": {"initial_scale_power": 26, "loss_scale_window": 8, "hysteresis": 1}}


@dataclass(frozen=True)
class Variant:
    """What one row trains.

    Attributes:
        stages: of ZeRO; a run each.
        zenflow: fields of the ``zenflow`` section.
        ranks: numbers of ranks; a run each.
        device: "cpu" or "sim", the simulated accelerator.
        changes: to the rest of the config, by section.
    """

    stages: tuple[int, ...]
    zenflow: dict[str, Any]
    ranks: tuple[int, ...] = (1, 2)
    device: str = "cpu"
    dtype: torch.dtype = torch.bfloat16
    changes: dict[str, dict[str, Any]] = field(default_factory=dict)

    def config(self, stage: int, is_new: bool) -> dict[str, Any]:
        """The config of a run; `is_new`: for this checkout."""
        zenflow = {**self.zenflow, **({"autotune": False} if is_new else {})}
        config = zenflow_config(stage, self.dtype, **zenflow)
        for section, fields in self.changes.items():
            config[section] |= fields
        return config


VARIANTS = {
    "predictive": Variant((1, 2, 3), PREDICTIVE),
    "predictive, fp32": Variant((2, 3), PREDICTIVE, (2,), dtype=torch.float32),
    "predictive, fp16 with skipped steps": Variant(
        (2, 3), PREDICTIVE, (2,), dtype=torch.float16, changes=OVERFLOWS
    ),
    "predictive, interval 4": Variant((2, 3), {**PREDICTIVE, "update_interval": 4}),
    "predictive, y in fp32": Variant((2,), {**PREDICTIVE, "publish_dtype": "float32"}, (1,)),
    "predictive, bf16 moments": Variant((2, 3), {**PREDICTIVE, "state_dtype": "bfloat16"}),
    "predictive, int8 moments": Variant((2, 3), {**PREDICTIVE, "state_dtype": "int8"}),
    "predictive, share of 0.6 on the accelerator": Variant((2, 3), PREDICTIVE, changes=SHARE),
    "predictive, Lion": Variant((2, 3), PREDICTIVE, changes=LION),
    "synchronous": Variant((1, 2, 3), {**PREDICTIVE, **SYNCHRONOUS}),
    "synchronous, bf16 moments": Variant(
        (2,), {**PREDICTIVE, **SYNCHRONOUS, "state_dtype": "bfloat16"}, (1,)
    ),
    "synchronous, int8 moments": Variant(
        (2,), {**PREDICTIVE, **SYNCHRONOUS, "state_dtype": "int8"}, (1,)
    ),
    "synchronous, Lion": Variant((2,), {**PREDICTIVE, **SYNCHRONOUS}, (1,), changes=LION),
    "selective": Variant((1, 2, 3), SELECTIVE),
    "selective, synchronous": Variant((2, 3), {**SELECTIVE, **SYNCHRONOUS}, (2,)),
    "selective, state of hot blocks on the host": Variant(
        (2,), {**SELECTIVE, "offload": True}, (2,)
    ),
    "selective, share of 0.6 on the accelerator": Variant((2, 3), SELECTIVE, (2,), changes=SHARE),
    "on a device, transfers in the step": Variant(
        (2, 3), {**PREDICTIVE, "hide_transfers": False, "gradients_on_host": False}, (2,), "sim"
    ),
    "on a device, hidden transfers": Variant(
        (2, 3), {**PREDICTIVE, "hide_transfers": True, "gradients_on_host": False}, (2,), "sim"
    ),
    "on a device, gradients on the host": Variant(
        (2, 3), {**PREDICTIVE, "hide_transfers": False, "gradients_on_host": True}, (2,), "sim"
    ),
    "on a device, weights on the host": Variant(
        (3,), {**PREDICTIVE, "hide_transfers": False}, (2,), "sim", changes=WEIGHTS_ON_HOST
    ),
    "on a device, selective": Variant((2, 3), {**SELECTIVE, "hide_transfers": False}, (2,), "sim"),
}


@dataclass(frozen=True)
class Side:
    """Who trains: a checkout's package, and whose square root."""

    name: str
    tree: Path
    torch_root: bool = False
    loads: str = ""

    @property
    def is_new(self) -> bool:
        return self.tree == ROOT


@dataclass(frozen=True)
class Row:
    """One run: a variant at one stage on some ranks."""

    name: str
    stage: int
    ranks: int

    @property
    def variant(self) -> Variant:
        return VARIANTS[self.name]

    def folder(self, work: Path, side: str) -> Path:
        """Where a side leaves losses and checkpoints."""
        words = self.name.replace(",", "").replace(" ", "-")
        return work / side / f"{words}-stage{self.stage}-ranks{self.ranks}"


def train(side: Side, rows: list[Row], work: Path) -> None:
    """Let `side` make all runs of `rows`, in one group of processes for those that can share it."""
    for device, ranks in sorted({(row.variant.device, row.ranks) for row in rows}):
        group = [row for row in rows if (row.variant.device, row.ranks) == (device, ranks)]
        folder = work / f"{side.name}-{device}-{ranks}"
        folder.mkdir()
        for package, tree in (("deepspeed_ext", side.tree), ("tests", ROOT)):
            (folder / package).symlink_to(tree / package)
        order = {
            "device": device,
            "ranks": ranks,
            "package": str((side.tree / "deepspeed_ext").resolve()),
            "rendezvous": str(folder / "rendezvous"),
            "torch_root": side.torch_root,
            "runs": [_run(side, row, work) for row in group],
        }
        (folder / "order.json").write_text(json.dumps(order))
        processes = [_rank(folder, rank, ranks, device) for rank in range(ranks)]
        try:
            for process in processes:
                process.wait(1800)
        finally:
            for process in processes:
                process.kill()


def _run(side: Side, row: Row, work: Path) -> dict[str, Any]:
    return {
        "folder": str(row.folder(work, side.name)),
        "config": row.variant.config(row.stage, side.is_new),
        "steps": STEPS,
        "first": MIDDLE if side.loads else 0,
        "load": str(row.folder(work, side.loads)) if side.loads else None,
        "saves": [STEPS] if side.loads else [MIDDLE, STEPS],
    }


def _rank(folder: Path, rank: int, ranks: int, device: str) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
    environment |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
    environment |= {"LOCAL_WORLD_SIZE": str(ranks), "LOCAL_SIZE": str(ranks)}
    environment |= (
        {"DS_ACCELERATOR": "cpu"} if device == "cpu" else {"SIMULATED_DEVICES": str(ranks)}
    )
    if device != "cpu":
        environment.pop("DS_ACCELERATOR", None)
    command = [sys.executable, "-m", "tests.perf.same_bits_process", str(folder / "order.json")]
    with open(folder / f"log{rank}", "wb") as log:
        return subprocess.Popen(command, cwd=folder, env=environment, stdout=log, stderr=log)


def losses_of(row: Row, work: Path, side: str) -> list[list[str]]:
    """Losses of every rank, each number as the text of its bits.

    Raises:
        RuntimeError: a run failed, with its traceback.
    """
    found = []
    for rank in range(row.ranks):
        path = row.folder(work, side) / f"rank{rank}.json"
        if not path.exists():
            raise RuntimeError(f"{side}, {row}: no answer; see the logs in {work}")
        answer = json.loads(path.read_text())
        if "error" in answer:
            raise RuntimeError(f"{side}, {row}: {answer['error']}")
        found.append(answer["losses"])
    return found


def skipped_of(row: Row, work: Path, side: str) -> int:
    """Steps that were skipped because of an overflow."""
    return int(json.loads((row.folder(work, side) / "rank0.json").read_text())["skipped"])


@dataclass(frozen=True)
class Gap:
    """How losses differ: the first step of which one does, 0 if none, and the most, over a loss."""

    step: int = 0
    most: float = 0.0

    def __str__(self) -> str:
        return f"from step {self.step}, by at most {self.most:.1e}"


def arrays(value: Any, where: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor and number of a nested value, with the path to it. The config is left out: it
    is another one, because `autotune` is off."""
    if isinstance(value, torch.Tensor):
        yield where, value
        return
    if isinstance(value, int | float):
        yield where, torch.tensor(value, dtype=torch.float64)
        return
    if hasattr(value, "__dict__") and not isinstance(value, type):
        value = vars(value)
    if isinstance(value, dict):
        items: Iterable[tuple[Any, Any]] = value.items()
    elif isinstance(value, list | tuple):
        items = enumerate(value)
    else:
        return
    for key, each in items:
        if key != "ds_config":
            yield from arrays(each, f"{where}/{key}")


def checkpoint(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor and number of every file of a checkpoint, by file and path."""
    found: dict[str, torch.Tensor] = {}
    for path in sorted(folder.rglob("*.pt")):
        content = torch.load(path, map_location="cpu", weights_only=False)
        found.update(arrays(content, str(path.relative_to(folder))))
    if not found:
        raise RuntimeError(f"{folder} has no tensors")
    return found


def apart(expected: dict[str, torch.Tensor], actual: dict[str, torch.Tensor]) -> str:
    """How two checkpoints differ: in how many elements of how many arrays; empty: in none."""
    words = []
    for text, names in (
        ("only before", expected.keys() - actual.keys()),
        ("only now", actual.keys() - expected.keys()),
    ):
        if names:
            words.append(f"{text}: {', '.join(sorted(names))}")
    differing, elements, total = [], 0, 0
    for name in sorted(expected.keys() & actual.keys()):
        one, other = (each[name].detach().contiguous().view(-1) for each in (expected, actual))
        total += one.numel()
        if one.dtype != other.dtype or one.shape != other.shape:
            words.append(
                f"{name}: {one.dtype} {list(one.shape)}, {other.dtype} {list(other.shape)}"
            )
            continue
        if not one.numel():
            continue
        bits = [each.view(torch.uint8).view(each.numel(), -1) for each in (one, other)]
        count = int((bits[0] != bits[1]).any(1).sum())
        elements += count
        differing += [name] if count else []
    if differing:
        found = f"{len(differing)} of {len(expected)} arrays, first {differing[0]}"
        words.append(f"{elements:,} of {total:,} elements, in {found}")
    return "; ".join(words)


def losses_apart(expected: list[list[str]], actual: list[list[str]], first: int = 1) -> Gap:
    """How the losses of all ranks differ, the first of which are those of step `first`."""
    pairs = [
        (step, float.fromhex(a), float.fromhex(b))
        for one, other in zip(expected, actual, strict=True)
        for step, (a, b) in enumerate(zip(one, other, strict=True), first)
        if a != b
    ]
    if not pairs:
        return Gap()
    return Gap(min(step for step, *_ in pairs), max(abs(a - b) / abs(a) for _, a, b in pairs))


def compare(row: Row, work: Path, side: str) -> tuple[Gap, str]:
    """How the losses and the checkpoints of a side differ from the earlier commit's."""
    first = MIDDLE if side == "resumed" else 0
    before = [losses[first:] for losses in losses_of(row, work, "before")]
    gap = losses_apart(before, losses_of(row, work, side), first + 1)
    told = [
        apart(*(checkpoint(row.folder(work, each) / str(tag)) for each in ("before", side)))
        for tag in ([STEPS] if first else [MIDDLE, STEPS])
    ]
    return gap, next(filter(None, told), "")


def show(name: str, rows: list[Row], work: Path) -> None:
    """Print the row of a variant; what differs but for roots, below it."""
    skipped = sum(skipped_of(row, work, "before") for row in rows)
    cells, found = [f"{name}, {skipped} skipped" if skipped else name], []
    stages, ranks = ({getattr(row, part) for row in rows} for part in ("stage", "ranks"))
    cells.append(f"{', '.join(map(str, sorted(stages)))}; {', '.join(map(str, sorted(ranks)))}")
    for side in ("now", "root", "resumed"):
        compared = [compare(row, work, side) for row in rows]
        gaps = [gap for gap, _ in compared if gap.step]
        pairs = zip(rows, compared, strict=True)
        others = [f"{side}, {row}: {told}" for row, (_, told) in pairs if told]
        worst = Gap(min(gap.step for gap in gaps), max(gap.most for gap in gaps)) if gaps else None
        cells.append(f"{len(gaps)} of {len(rows)} differ, {worst}" if worst else "equal")
        cells.append(f"{len(others)} of {len(rows)} differ" if others else "equal")
        found += others if side != "now" else []
    print("| " + " | ".join(cells) + " |", *found, sep="\n", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--before", required=True, help="the earlier commit")
    parser.add_argument("--only", default="", help="variants whose name has this text")
    parser.add_argument("--keep", type=Path, help="a new folder for runs and logs, which stay")
    args = parser.parse_args()
    rows = [
        Row(name, stage, ranks)
        for name, variant in VARIANTS.items()
        if args.only in name
        for stage in variant.stages
        for ranks in variant.ranks
    ]
    with tempfile.TemporaryDirectory() as temporary, checkout(args.before) as before:
        work = args.keep or Path(temporary)
        work.mkdir(parents=True, exist_ok=True)
        for side in (
            Side("before", before),
            Side("now", ROOT),
            Side("root", ROOT, torch_root=True),
            Side("resumed", ROOT, torch_root=True, loads="before"),
        ):
            train(side, rows, work)
        heads = [
            f"{what}, {side}"
            for side in ("as it is", "same root", "resumed")
            for what in ("losses", "checkpoints")
        ]
        print("| run | stages; ranks | " + " | ".join(heads) + " |")
        print("|" + " --- |" * (len(heads) + 2))
        for name in dict.fromkeys(row.name for row in rows):
            try:
                show(name, [row for row in rows if row.name == name], work)
            except RuntimeError as error:
                print(f"| {name} | failed: {error} |", flush=True)


if __name__ == "__main__":
    main()
