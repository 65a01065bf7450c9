"""One rank of a soak run: resumes from the newest checkpoint that can be read, trains, saves now
and then.

It saves under two kinds of tags in turn: a number, which is the step, and ``rolling``, which is
used again each time.

Writes to its folder, where RANK is its number: ``curve-RANK.jsonl``, a line [step, loss as bits]
for every step, those done again after a resume included; ``events-RANK.jsonl``; and at the end
``final-RANK.json``, a digest of weights and masters. The run ends at the step that the file
``last-step`` names, which may be written while it trains.

Faults that a rank has to bring upon itself are asked for by files, too: ``disk-full-RANK`` for its
next save, ``kill-in-save-RANK`` for its next ``rolling`` save, at the moment in the file, and
``drop-engine-RANK`` after the step in the file.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import hashlib
import json
import math
import os
import re
import resource
import shutil
import signal
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import deepspeed
import psutil
import torch

import deepspeed_ext
from deepspeed_ext import shared_buffers
from deepspeed_ext.errors import CheckpointError
from tests.soak.operations import FileOperations
from tests.soak.plan import FORMS
from tests.support.models import OddModel, two_groups
from tests.support.zenflow import full_masters_of, weights_of, zenflow_config

PR_SET_PDEATHSIG = 1
DISK_BYTES = 16 * 2**10
CHECKPOINTS_KEPT = 4
ROLLING = "rolling"


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--stage", type=int, required=True)
    parser.add_argument("--form", choices=FORMS, default="plain")
    parser.add_argument(
        "--save-every", type=int, default=0, help="steps between checkpoints; 0: none"
    )
    parser.add_argument(
        "--pace-seconds", type=float, default=0.0, help="sleep in each step, in place of a device"
    )
    parser.add_argument("--worker-timeout-seconds", type=float, default=15.0)
    parser.add_argument("--group-timeout-seconds", type=float, default=20.0)
    return parser.parse_args()


def settings_of(form: str, stage: int) -> dict[str, dict[str, Any]]:
    """What one of `FORMS` adds to sections of the config; "on the host" is what the stage can keep
    there."""
    selective = {
        "topk_ratio": 0.1,
        "select_interval": 16,
        "overlap_step": True,
    }
    on_host: dict[int, dict[str, dict[str, Any]]] = {
        1: {"zenflow": {"hide_transfers": False}},
        2: {"zenflow": {"gradients_on_host": True}},
        3: {"zero_optimization": {"offload_param": {"device": "cpu", "pin_memory": False}}},
    }
    return {
        "plain": {},
        "bf16 moments": {"zenflow": {"state_dtype": "bfloat16"}},
        "8-bit moments": {"zenflow": {"state_dtype": "int8"}},
        "on the host": on_host[stage],
        "half on the host": {
            "zero_optimization": {"offload_optimizer": {"device": "cpu", "ratio": 0.5}}
        },
        "Lion": {"optimizer": {"type": "Lion", "params": {"lr": 1e-4, "weight_decay": 0.1}}},
        "selective": {"zenflow": selective},
    }[form]


@contextmanager
def full_disk(wanted: bool) -> Iterator[None]:
    """If `wanted`, files cannot grow beyond a few KiB inside the block."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if wanted:
        resource.setrlimit(resource.RLIMIT_FSIZE, (DISK_BYTES, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def holdings(counts_arenas: bool) -> dict[str, Any]:
    """What this process holds of the machine: its children, its open files by kind, and shared
    memory that it maps."""
    kinds = "/dev/shm/|/memfd:" if counts_arenas else "/dev/shm/"
    targets = []
    for number in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # the descriptor of the listing itself
            targets.append(os.readlink(f"/proc/self/fd/{number}"))
    lines = [line.split(maxsplit=5) for line in Path("/proc/self/maps").read_text().splitlines()]
    shared = {(line[4], line[5]) for line in lines if line[5:] and re.match(kinds, line[5])}
    return {
        "children": len(psutil.Process().children()),
        "files": dict(sorted(Counter(re.sub(r"\d+", "N", target) for target in targets).items())),
        "shared memory": len(shared),
    }


class Trainer:
    """An engine, and what it leaves in the folder."""

    def __init__(self, args: argparse.Namespace, rank: int) -> None:
        self.args, self.rank = args, rank
        self.curve = (args.folder / f"curve-{rank}.jsonl").open("a", buffering=1)
        self.events = (args.folder / f"events-{rank}.jsonl").open("a", buffering=1)
        self.operations = FileOperations(args.folder)
        self.engine = self.build()

    def build(self) -> Any:
        """A new engine, the same each time."""
        torch.manual_seed(0)
        form = settings_of(self.args.form, self.args.stage)
        config = zenflow_config(
            self.args.stage,
            worker_timeout_seconds=self.args.worker_timeout_seconds,
            **form.get("zenflow", {}),
        )
        config["zero_optimization"] |= form.get("zero_optimization", {})
        config["optimizer"] = form.get("optimizer", config["optimizer"])
        config["scheduler"] = {
            "type": "WarmupCosineLR",
            "params": {"total_num_steps": 10**5, "warmup_num_steps": 50},
        }
        model = OddModel(width=299)
        engine, *_ = deepspeed_ext.initialize(
            model=model, model_parameters=two_groups(model), config=config
        )
        return engine

    def resume(self) -> int:
        """Load the newest checkpoint that can be read; returns its step, 0 if there is none.

        ``rolling`` is loaded in any case, to see whether it is whole and from which step.
        """
        refused: list[dict[str, str]] = []
        steps = {str(step): step for step in self.saved_steps()}
        # a save that was interrupted may be under another name
        rolled = any(self.args.folder.glob(f"{ROLLING}*"))
        torch.distributed.barrier()  # loading may rename folders
        rolling = self.load(ROLLING, refused) if rolled else None
        if rolling is not None:
            steps[ROLLING] = rolling
        newest_first = sorted(steps, key=steps.__getitem__, reverse=True)
        tag = next((tag for tag in newest_first if self.load(tag, refused) is not None), None)
        if refused and not tag:
            raise CheckpointError(f"none of the checkpoints can be read: {refused}")
        step = steps[tag] if tag else 0
        self.note("resumed", step=step, tag=tag, rolling=rolling, refused=refused)
        return step

    def load(self, tag: str, refused: list[dict[str, str]]) -> int | None:
        """Load a checkpoint, which must be of one step on all ranks and in all its files.

        Returns:
            Its step; None if it was refused, which is then in `refused`.
        """
        try:
            found, _ = self.engine.load_checkpoint(str(self.args.folder), tag=tag)
        except CheckpointError as error:
            refused.append({"tag": tag, "error": str(error)})
            return None
        if found is None:
            refused.append({"tag": tag, "error": "nothing was found"})
            return None
        mine = (self.engine.global_steps, self.engine.optimizer.host_optimizer.state.updates)
        steps = [mine] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(steps, mine)
        if len({step for pair in steps for step in pair}) > 1:
            raise AssertionError(
                f"checkpoint {tag!r} is a mixture: steps of engine and optimizer by rank: {steps}"
            )
        return mine[0]

    def saved_steps(self) -> list[int]:
        """Steps of the numbered checkpoints, newest first; what is newer than ``latest`` was never
        finished."""
        latest = self.args.folder / "latest"
        if not latest.exists():
            return []
        steps = [int(path.name) for path in self.args.folder.iterdir() if path.name.isdigit()]
        return sorted((step for step in steps if step <= int(latest.read_text())), reverse=True)

    def train(self, step: int) -> None:
        """Train from after `step` to the last step."""
        while step < self.last_step():
            step += 1
            generator = torch.Generator().manual_seed(1009 * step + self.rank)
            loss = self.engine(torch.randint(0, 64, (4, 16), generator=generator))
            time.sleep(self.args.pace_seconds)
            self.engine.backward(loss)
            self.engine.step()
            self.curve.write(json.dumps([step, loss.item().hex()]) + "\n")
            self.save(step)
            if step == self.asked("drop-engine"):
                self.forget("drop-engine")
                del loss
                step = self.drop_engine()

    def last_step(self) -> float:
        """The step to end at, as far as is known."""
        path = self.args.folder / "last-step"
        return int(path.read_text()) if path.exists() else math.inf

    def save(self, step: int) -> None:
        """Save if it is time, and forget old checkpoints; a save that fails is noted, and training
        goes on."""
        every = self.args.save_every
        if not every or step % every not in (0, every // 2):
            return
        tag, moment = str(step), None
        if step % every:
            tag = ROLLING
            if self.operations.count and (moment := self.asked("kill-in-save")) is not None:
                self.forget("kill-in-save")
        disk_is_full = self.asked("disk-full") is not None
        self.forget("disk-full")
        watching = self.operations.watch(moment) if tag == ROLLING else nullcontext()
        try:
            with full_disk(disk_is_full), watching:
                self.engine.save_checkpoint(
                    str(self.args.folder), tag=tag, save_latest=tag != ROLLING
                )
        except CheckpointError as error:
            self.note("save failed", step=step, error=str(error))
            return
        self.note("saved", step=step, tag=tag)
        for old in self.saved_steps()[CHECKPOINTS_KEPT:] if self.rank == 0 else ():
            shutil.rmtree(self.args.folder / str(old))

    def drop_engine(self) -> int:
        """Forget the engine without `destroy`, build another and resume; returns the step that it
        resumed from."""
        # DeepSpeed never frees a stage 3 optimizer, not even
        # after `destroy`, so its masters stay in their arena.
        counts_arenas = self.args.stage < 3
        before, begin = holdings(counts_arenas), time.monotonic()
        del self.engine
        for _ in range(2):  # the first runs finalizers, and what they held goes with the second
            gc.collect()
        between = holdings(counts_arenas)
        self.engine = self.build()
        step = self.resume()
        after = holdings(counts_arenas)
        self.note(
            "dropped", before=before, between=between, after=after, seconds=time.monotonic() - begin
        )
        return step

    def asked(self, what: str) -> float | None:
        """What the file that asks this rank for a fault says, None if there is none."""
        path = self.args.folder / f"{what}-{self.rank}"
        return float(path.read_text()) if path.exists() else None

    def forget(self, what: str) -> None:
        """The fault is on its way."""
        (self.args.folder / f"{what}-{self.rank}").unlink(missing_ok=True)

    def finish(self) -> None:
        """Write the digest of what was trained."""
        digest = hashlib.sha256()
        for tensor in (*weights_of(self.engine).values(), *full_masters_of(self.engine)):
            digest.update(tensor.numpy().tobytes())
        (self.args.folder / f"final-{self.rank}.json").write_text(json.dumps(digest.hexdigest()))
        self.engine.destroy()

    def note(self, event: str, **what: object) -> None:
        """Write an event."""
        self.events.write(json.dumps({"event": event, **what}) + "\n")


def main() -> None:
    args, rank = parse_args(), int(os.environ["RANK"])
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    torch.distributed.init_process_group(
        "gloo",
        init_method=f"file://{os.environ['SOAK_RENDEZVOUS']}",
        rank=rank,
        world_size=int(os.environ["WORLD_SIZE"]),
        timeout=timedelta(seconds=args.group_timeout_seconds),
    )
    with shared_buffers.not_made():
        deepspeed.init_distributed(dist_backend="gloo")
    trainer = Trainer(args, rank)
    trainer.train(trainer.resume())
    trainer.finish()


if __name__ == "__main__":
    main()
