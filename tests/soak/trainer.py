"""One rank of a soak run: resumes from the newest checkpoint that can be read, trains, saves now
and then.

It saves under two kinds of tags in turn: a number, which is the step, and ``rolling``, which is
used again each time. It writes to its folder, where RANK is its number: ``curve-RANK.jsonl``, a
line [step, loss as bits] for every step, those done again after a resume included; and at the
end ``final-RANK``, a digest of weights and masters. The run ends at the step that the file
``last-step`` names, which may be written while it trains.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import json
import math
import os
import shutil
import signal
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import deepspeed
import torch

import deepspeed_ext
from deepspeed_ext.adapter.upstream import no_shared_buffers, swapped
from deepspeed_ext.errors import CheckpointError
from tests.support.models import OddModel, two_groups
from tests.support.zenflow import full_masters_of, weights_of, zenflow_config

__all__ = ["FORMS"]

PR_SET_PDEATHSIG = 1
CHECKPOINTS_KEPT = 4
ROLLING = "rolling"
FORMS: dict[str, dict[str, Any]] = {
    "8-bit moments": {"zenflow": {"state_dtype": "int8"}},
    "on the host": {},
    "half on the host": {
        "zero_optimization": {"offload_optimizer": {"device": "cpu", "ratio": 0.5}}
    },
    "Lion": {"optimizer": {"type": "Lion", "params": {"lr": 1e-4, "weight_decay": 0.1}}},
    "exact": {"zenflow": {"update_rule": "exact"}},
    "beside training": {"zenflow": {"async_save": True}},
    "selective": {"zenflow": {"topk_ratio": 0.1, "select_interval": 16, "overlap_step": True}},
}
"""What is trained, by name: what it adds to sections of the config."""
ON_HOST: dict[int, dict[str, Any]] = {
    1: {},
    2: {"zenflow": {"gradients_on_host": True}},
    3: {"zero_optimization": {"offload_param": {"device": "cpu", "pin_memory": False}}},
}
"""The form "on the host", by stage."""


def engine_of(args: argparse.Namespace) -> Any:
    """The same engine each time."""
    torch.manual_seed(0)
    form = FORMS[args.form] or ON_HOST[args.stage]
    config = zenflow_config(
        args.stage,
        worker_timeout_seconds=args.worker_timeout_seconds,
        autotune=False,
        **form.get("zenflow", {}),
    )
    config["zero_optimization"] |= form.get("zero_optimization", {})
    config["optimizer"] = form.get("optimizer", config["optimizer"])
    schedule = {"total_num_steps": 10**5, "warmup_num_steps": 50}
    config["scheduler"] = {"type": "WarmupCosineLR", "params": schedule}
    model = OddModel(width=299)
    return deepspeed_ext.initialize(model=model, model_parameters=two_groups(model), config=config)[
        0
    ]


class Trainer:
    """An engine, and what it leaves in the folder."""

    def __init__(self, args: argparse.Namespace, rank: int) -> None:
        self.args, self.rank, self.folder = args, rank, args.folder
        self.curve = (self.folder / f"curve-{rank}.jsonl").open("a", buffering=1)
        self.engine = engine_of(args)

    def resume(self) -> int:
        """Load the newest checkpoint that can be read; returns its step, 0 if there is none.

        ``rolling`` is loaded in any case, to see whether it is whole and from which step.
        """
        steps = {str(step): step for step in self.saved_steps()}
        # a save that was interrupted may be under another name
        rolled = any(self.folder.glob(f"{ROLLING}*"))
        torch.distributed.barrier()  # loading may rename folders
        if rolled and (step := self.load(ROLLING)) is not None:
            steps[ROLLING] = step
        newest_first = sorted(steps, key=steps.__getitem__, reverse=True)
        tag = next((tag for tag in newest_first if self.load(tag) is not None), None)
        if newest_first and not tag:
            raise CheckpointError(f"none of the checkpoints can be read: {newest_first}")
        return steps[tag] if tag else 0

    def load(self, tag: str) -> int | None:
        """Load a checkpoint, which must be of one step on all ranks and in all its files; None if
        it is refused."""
        try:
            found, _ = self.engine.load_checkpoint(str(self.folder), tag=tag)
        except CheckpointError:
            found = None
        if found is None:
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
        latest = self.folder / "latest"
        if not latest.exists():
            return []
        steps = [int(path.name) for path in self.folder.iterdir() if path.name.isdigit()]
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

    def last_step(self) -> float:
        """The step to end at, as far as is known."""
        path = self.folder / "last-step"
        return int(path.read_text()) if path.exists() else math.inf

    def save(self, step: int) -> None:
        """Save if it is time, and forget old checkpoints."""
        every = self.args.save_every
        if not every or step % every not in (0, every // 2):
            return
        rolls = bool(step % every)
        self.engine.save_checkpoint(
            str(self.folder), tag=ROLLING if rolls else str(step), save_latest=not rolls
        )
        for old in self.saved_steps()[CHECKPOINTS_KEPT:] if self.rank == 0 else ():
            shutil.rmtree(self.folder / str(old))

    def finish(self) -> None:
        """Write the digest of what was trained."""
        digest = hashlib.sha256()
        for tensor in (*weights_of(self.engine).values(), *full_masters_of(self.engine)):
            digest.update(tensor.numpy().tobytes())
        (self.folder / f"final-{self.rank}").write_text(digest.hexdigest())
        self.engine.destroy()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--stage", type=int, required=True)
    parser.add_argument("--form", choices=FORMS, required=True)
    parser.add_argument("--save-every", type=int, default=0, help="steps; 0: never")
    parser.add_argument("--pace-seconds", type=float, default=0.0, help="in place of a device")
    parser.add_argument("--worker-timeout-seconds", type=float, required=True)
    parser.add_argument("--group-timeout-seconds", type=float, required=True)
    args, rank = parser.parse_args(), int(os.environ["RANK"])
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    torch.distributed.init_process_group(
        "gloo",
        init_method=f"file://{os.environ['SOAK_RENDEZVOUS']}",
        rank=rank,
        world_size=int(os.environ["WORLD_SIZE"]),
        timeout=timedelta(seconds=args.group_timeout_seconds),
    )
    with swapped(no_shared_buffers()):
        deepspeed.init_distributed(dist_backend="gloo")
    trainer = Trainer(args, rank)
    trainer.train(trainer.resume())
    trainer.finish()


if __name__ == "__main__":
    main()
