"""One rank of a soak run: resumes from the newest checkpoint that can be read, trains, saves now and then.

Writes to its folder, where RANK is its number: ``curve-RANK.jsonl``, a line [step, loss as bits] for every step, those
done again after a resume included; ``events-RANK.jsonl``; and at the end ``final-RANK.json``, a digest of weights and
masters. The end is the step that the file ``last-step`` there names, which may be written while it trains. Signal USR2
lets its next save meet a full disk.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import json
import math
import os
import resource
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import deepspeed
import torch

import deepspeed_ext
from deepspeed_ext import shared_buffers
from deepspeed_ext._errors import CheckpointError
from tests.support.models import OddModel, two_groups
from tests.support.zenflow import full_masters_of, weights_of, zenflow_config

PR_SET_PDEATHSIG = 1
DISK_BYTES = 16 * 2**10
CHECKPOINTS_KEPT = 4
RULES: dict[str, dict[str, Any]] = {
    "predictive": {"update_rule": "predictive"},
    "selective": {"topk_ratio": 0.1, "select_block_size": 32, "select_interval": 16, "overlap_step": True},
}

full_disks = 0


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--stage", type=int, required=True)
    parser.add_argument("--interval", type=int, required=True)
    parser.add_argument("--rule", choices=RULES, default="predictive")
    parser.add_argument("--save-every", type=int, default=0, help="steps between checkpoints; 0: none")
    parser.add_argument("--pace-seconds", type=float, default=0.0, help="sleep in each step, in place of a device")
    parser.add_argument("--worker-timeout-seconds", type=float, default=60.0)
    parser.add_argument("--group-timeout-seconds", type=float, default=20.0)
    return parser.parse_args()


def note_full_disk(*_: object) -> None:
    global full_disks
    full_disks += 1


@contextmanager
def perhaps_full_disk() -> Iterator[None]:
    """If one was asked for, files cannot grow beyond a few KiB inside the block."""
    global full_disks
    if not full_disks:
        yield
        return
    full_disks -= 1
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (DISK_BYTES, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


class Trainer:
    """An engine, and what it leaves in the folder."""

    def __init__(self, args: argparse.Namespace, rank: int) -> None:
        torch.manual_seed(0)
        settings = {"update_interval": args.interval, "worker_timeout_seconds": args.worker_timeout_seconds}
        config = zenflow_config(args.stage, **settings, **RULES[args.rule])
        config["scheduler"] = {"type": "WarmupCosineLR", "params": {"total_num_steps": 10**5, "warmup_num_steps": 50}}
        model = OddModel(width=299)
        self.engine, *_ = deepspeed_ext.initialize(model=model, model_parameters=two_groups(model), config=config)
        self.args, self.rank = args, rank
        self.curve = (args.folder / f"curve-{rank}.jsonl").open("a", buffering=1)
        self.events = (args.folder / f"events-{rank}.jsonl").open("a", buffering=1)

    def resume(self) -> int:
        """Load the newest checkpoint that can be read; returns its step, 0 if there is none."""
        refused = []
        for step in self.saved_steps():
            try:
                self.engine.load_checkpoint(str(self.args.folder), tag=str(step))
                break
            except CheckpointError as error:
                refused.append({"step": step, "error": str(error)})
        else:
            if refused:
                raise CheckpointError(f"none of the checkpoints can be read: {refused}")
            step = 0
        self.note("resumed", step=step, refused=refused)
        return step

    def saved_steps(self) -> list[int]:
        """Steps of the checkpoints, newest first; what is newer than DeepSpeed's ``latest`` was never finished."""
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
            if self.args.save_every and step % self.args.save_every == 0:
                self.save(step)

    def last_step(self) -> float:
        """The step to end at, as far as is known."""
        path = self.args.folder / "last-step"
        return int(path.read_text()) if path.exists() else math.inf

    def save(self, step: int) -> None:
        """Save and forget old checkpoints; a save that fails is noted, and training goes on."""
        try:
            with perhaps_full_disk():
                self.engine.save_checkpoint(str(self.args.folder), tag=str(step))
        except CheckpointError as error:
            self.note("save failed", step=step, error=str(error))
            return
        for old in self.saved_steps()[CHECKPOINTS_KEPT:] if self.rank == 0 else ():
            shutil.rmtree(self.args.folder / str(old))

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
    signal.signal(signal.SIGUSR2, note_full_disk)
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
