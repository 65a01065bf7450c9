"""Runs one rank of a check: trains plainly, trains with the user's config, saves, resumes, and
kills the optimizer process.

`main` takes the folder of the check, which holds the plan, and the phase. The phase ``train`` does
everything up to the worker's death; ``resume`` continues from the checkpoint in new processes. The
measurements are written to a file after every part, so that they are not lost if a later part hangs
or crashes.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from deepspeed_ext.commands.verify.config import Plan
from deepspeed_ext.commands.verify.figures import (
    Changed,
    Death,
    Failure,
    Found,
    Movement,
    Resumed,
    Stage,
    write,
)
from deepspeed_ext.runtime.child_process import end_with_parent

__all__ = ["CHECKPOINT", "KILLED", "PARENT", "PLAN", "Rank", "main", "result_file", "step_file"]

PLAN = "plan.json"
CHECKPOINT = "checkpoint"
WEIGHTS = "weights.pt"
MASTERS = "masters.pt"
KILLED = "killed"
"""Files in the folder of the check. `KILLED` appears when the optimizer process is killed."""
PARENT = "DSEXT_VERIFY_PARENT"
"""Variable with the id of the checking process; ranks end with that process."""
GROUP_TIMEOUT_SECONDS = 600.0


def result_file(folder: Path, phase: str, rank: int) -> Path:
    """The file to which a rank writes its measurements."""
    return folder / f"{phase}-{rank}.json"


def step_file(folder: Path, phase: str) -> Path:
    """The file with the number of the step that the first rank has begun, from 1."""
    return folder / f"{phase}.step"


def read_plan(folder: Path) -> Plan:
    return TypeAdapter(Plan).validate_python(json.loads((folder / PLAN).read_text()))


class Rank:
    """A rank and its measurements. Each public method is a part of the check, in this order."""

    def __init__(self, folder: Path, phase: str) -> None:
        self.folder, self.phase, self.number = folder, phase, int(os.environ["RANK"])
        self.plan = read_plan(folder)
        self.found = Found()
        self._file = result_file(folder, phase, self.number)
        self.engine: Any = None
        self._eps = self._lr = 0.0
        self._runs: tuple[Any, Any] | None = None
        self._earlier: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._trainings: tuple[Any, Any] | None = None

    @contextmanager
    def stage(self, name: Stage) -> Iterator[None]:
        """Write the measurements at the end of a part, or the error that ended it."""
        self.found.stage = name
        try:
            yield
        except BaseException as error:
            self.found.failure = Failure.of(name, error)
            raise
        finally:
            write(self.found, self._file)

    def start(self) -> None:
        """Join the other ranks, and take this rank's device."""
        with self.stage("start"):
            import torch

            from deepspeed_ext.adapter import shared_buffers, upstream

            if self.plan.dtype == "float16":
                upstream.fp16_on_any_cpu()
            accelerator = upstream.get_accelerator()
            backend = "gloo"
            if accelerator.device_name() != "cpu":
                accelerator.set_device(int(os.environ["LOCAL_RANK"]))
                backend = accelerator.communication_backend_name()
            meeting = str(self.folder / f"rendezvous-{self.phase}")
            torch.distributed.init_process_group(
                backend,
                # a URL would end at a # in the path
                store=torch.distributed.FileStore(meeting, self.plan.ranks),
                rank=self.number,
                world_size=self.plan.ranks,
                timeout=timedelta(seconds=GROUP_TIMEOUT_SECONDS),
            )
            with shared_buffers.not_made():
                upstream.deepspeed.init_distributed(dist_backend=backend)
            self.device = torch.device(accelerator.current_device_name())

    def train_plainly(self) -> None:
        """Train with torch's optimizer, twice: the second time with differently rounded
        gradients."""
        if self.plan.optimizer is None:
            return
        with self.stage("plain"):
            import torch

            from deepspeed_ext.commands.verify.reference import train_plainly

            self._eps = torch.finfo(getattr(torch, self.plan.communication)).eps
            plain, noisy = (
                train_plainly(self.plan, self.device, noise) for noise in (0.0, self._eps)
            )
            self._runs = plain, noisy
            self.found.plain, self.found.untrained = plain.losses, plain.untrained
            self.found.plain_norms, self.found.plain_skipped = plain.norms, plain.skipped
            both = zip(plain.losses, noisy.losses, strict=True)
            self.found.noise = max(abs(one - other) for one, other in both)

    def initialize(self) -> None:
        """Build the engine, and compare its weights with those of the model."""
        with self.stage("initialize"):
            from deepspeed_ext.commands.verify.model import new_model

            before = self._initial()
            self.engine = self.make_engine(new_model(self.plan.flat_model))
            after = self.weights()
            changed = {name: int((after[name] != value).sum()) for name, value in before.items()}
            self.found.changed = Changed(
                sum(value.numel() for value in before.values()),
                len(before),
                {k: n for k, n in changed.items() if n},
            )

    def replay(self) -> None:
        """Make both plain trainings take their gradients at the engine's weights from now on. Their
        masters must then equal the engine's, even if weights are predicted or stage 3 has replaced
        functions of torch."""
        if self.plan.optimizer is None or self.plan.rule == "deferred":
            return
        from deepspeed_ext.commands.verify.reference import PlainRun, PlainTraining

        plain, noisy = (PlainTraining(self.plan, self.device, noise) for noise in (0.0, self._eps))
        kept = self.plan.longest_interval  # masters wait for the end of an interval
        runs = [
            PlainRun(initial=each.weights(), masters=deque(maxlen=kept)) for each in (plain, noisy)
        ]
        self._trainings, self._runs = (plain, noisy), (runs[0], runs[1])

    def make_engine(self, model: Any) -> Any:
        """The engine, as a user's script makes it."""
        import deepspeed_ext
        from deepspeed_ext.adapter.upstream import deepspeed

        initialize = deepspeed.initialize if self.plan.upstream else deepspeed_ext.initialize
        parameters = list(model.parameters())
        return initialize(model=model, model_parameters=parameters, config=self.plan.config)[0]

    def weights(self) -> dict[str, Any]:
        """The module's parameters in full, fp32 on the host; all ranks call this together."""
        from deepspeed_ext.adapter.upstream import deepspeed

        found = {}
        for name, param in self.engine.module.named_parameters():
            if self.engine.zero_optimization_stage() == 3:
                with deepspeed.zero.GatheredParameters([param]):
                    found[name] = param.detach().float().cpu().clone()
            else:
                found[name] = param.detach().float().cpu().clone()
        return found

    def train(self) -> None:
        """Take all steps, and save after one of them."""
        with self.stage("train"):
            self._train(0, self.plan.save_after)
        with self.stage("save"):
            self.engine.save_checkpoint(str(self.folder / CHECKPOINT), tag="saved")
        with self.stage("train"):
            self._train(self.plan.save_after, self.plan.steps)

    def _train(self, first: int, last: int) -> None:
        looked_at = (self.plan.steps // 2, self.plan.steps - 2 * self.plan.longest_interval)
        for step in range(first, last):
            if step in looked_at and step:
                weights = self.weights()
                self._earlier.append((weights, self._masters(weights)))
            if self._trainings is not None and self._runs is not None:
                weights = self.weights()
                for training, run in zip(self._trainings, self._runs, strict=True):
                    training.follow(weights)
                    run.add(training, step)
            self._lr = max([self._lr, *map(float, self.engine.get_lr())])
            if self.number == 0:
                step_file(self.folder, self.phase).write_text(str(step + 1))
            self.found.losses.append(self.step(step))
            norm = self.engine.get_global_grad_norm()
            self.found.norms.append(None if norm is None else float(norm))
            self._lr = max([self._lr, *map(float, self.engine.get_lr())])
            if getattr(self.engine.optimizer, "overflow", False):
                self.found.skipped.append(step)

    def step(self, number: int) -> float:
        """Take one optimizer step; return this rank's mean loss."""
        from deepspeed_ext.commands.verify.model import data_of

        losses = []
        for tokens, tags in data_of(number, self.number, self.plan.batches):
            loss = self.engine(tokens.to(self.device), tags.to(self.device))
            self.engine.backward(loss)
            self.engine.step()
            losses.append(loss.item())
        return sum(losses) / len(losses)

    def compare(self) -> None:
        """Compare how each parameter moved, and keep the final weights for the phase ``resume``."""
        with self.stage("compare"):
            import torch

            weights = self.weights()
            masters = self._masters(weights)
            from deepspeed_ext.commands.verify.weights import compare_weights

            if self.number == 0:
                torch.save(weights, self.folder / WEIGHTS)
                torch.save(masters, self.folder / MASTERS)
            self._movements(masters)
            earlier = [(self._initial(), self._initial()), *self._earlier]
            self.found.weights = compare_weights(self.plan, weights, masters, earlier, self._lr)
            if self._runs is not None:
                self.found.plain_norms = self._runs[0].norms

    def _masters(self, weights: dict[str, Any]) -> dict[str, Any]:
        """The fp32 masters, or the weights if there are none. The masters of DeepSpeed's own
        ZenFlow are out of date."""
        from deepspeed_ext.adapter.upstream import master_of

        if self.plan.upstream and self.plan.rule == "deferred":
            return weights
        found = {}
        for name, param in self.engine.module.named_parameters():
            master = master_of(param)
            found[name] = (
                weights[name] if master is None else master.float().cpu().view_as(weights[name])
            )
        return found

    def _initial(self) -> dict[str, Any]:
        """The weights before the first step, in the config's dtype."""
        import torch

        from deepspeed_ext.commands.verify.model import new_model

        dtype = getattr(torch, self.plan.dtype)
        named = new_model(self.plan.flat_model).named_parameters()
        return {name: param.detach().to(dtype).float() for name, param in named}

    def _movements(self, ends: dict[str, Any]) -> None:
        if self._runs is None:
            for name, start in self._initial().items():
                length = float((ends[name] - start).norm())
                self.found.movements.append(Movement(name, start.numel(), length, 0.0, 0.0, 0.0))
            return

        plain, noisy = self._runs

        def distance(masters: dict[str, Any]) -> float:
            return sum(
                float((ends[name] - master).square().sum()) for name, master in masters.items()
            )

        behind = min(
            range(len(plain.masters)), key=lambda steps: distance(plain.masters[-1 - steps])
        )
        target, other = plain.masters[-1 - behind], noisy.masters[-1 - behind]
        self.found.in_flight = behind
        for name, start in plain.initial.items():
            apart = ends[name] - target[name], target[name] - other[name]
            lengths = [
                float(each.norm()) for each in (ends[name] - start, target[name] - start, *apart)
            ]
            self.found.movements.append(Movement(name, start.numel(), *lengths))

    def lose_worker(self) -> None:
        """Kill rank 0's optimizer process and train on until there is an error."""
        if not self.plan.has_worker:
            return
        from deepspeed_ext.runtime.backend import dist

        with self.stage("worker"):
            victim = _worker_pid(self.engine)
            dist.barrier()
            if self.number == 0:
                (self.folder / KILLED).touch()
                os.kill(victim, signal.SIGKILL)
        begin, steps = time.monotonic(), 0
        error: Failure | None = None
        most = 4 * self.plan.longest_interval + 4
        try:
            for steps in range(1, most + 1):
                self.step(self.plan.steps + steps)
        except BaseException as raised:
            error = Failure.of("worker", raised)
        self.found.death = Death(time.monotonic() - begin, steps, error)
        write(self.found, self._file)

    def resume(self) -> None:
        """Load the checkpoint and repeat the steps after it."""
        expected = Found.read(result_file(self.folder, "train", self.number))
        with self.stage("initialize"):
            from deepspeed_ext.commands.verify.model import new_model

            self.engine = self.make_engine(new_model(self.plan.flat_model))
        with self.stage("resume"):
            self.load()
            self._train(self.plan.save_after, self.plan.steps)
            rest = range(self.plan.save_after, self.plan.steps)
            pairs = {
                step: (expected.losses[step], loss)
                for step, loss in zip(rest, self.found.losses, strict=True)
            }
            apart = {step: pair for step, pair in pairs.items() if pair[0] != pair[1]}
            weights = self.weights()
            others = self._others(weights, WEIGHTS), self._others(self._masters(weights), MASTERS)
            self.found.resumed = Resumed(apart, *others)

    def load(self) -> None:
        """Load the checkpoint, as a user's script does."""
        path, _ = self.engine.load_checkpoint(str(self.folder / CHECKPOINT), tag="saved")
        if path is None:
            raise FileNotFoundError("load_checkpoint found nothing to load")

    def _others(self, found: dict[str, Any], name: str) -> int:
        """Number of elements that differ from the final ones of the uninterrupted run, in the file
        `name`."""
        import torch

        before = torch.load(self.folder / name)
        return sum(int((found[name] != value).sum()) for name, value in before.items())

    def end(self) -> None:
        """End as a script does."""
        with self.stage("end"):
            from deepspeed_ext.runtime.backend import dist

            self.engine.destroy()
            dist.destroy_process_group()


def _worker_pid(engine: Any) -> int:
    """Process id of a rank's optimizer process, ours or that of DeepSpeed's own ZenFlow."""
    adam = getattr(engine.optimizer, "host_optimizer", None)
    process = engine.optimizer.process if adam is None else adam.link.process
    return int(process.pid)


def main(kind: Callable[[Path, str], Rank] = Rank) -> None:
    """Run one phase. Arguments of the process: the folder, the phase.

    Args:
        kind: a subclass with a fault, for tests.
    """
    end_with_parent()
    if not os.path.exists(f"/proc/{os.environ[PARENT]}"):  # it ended before the line above ran
        raise SystemExit("the check has ended before this rank began")
    folder, phase = Path(sys.argv[1]), sys.argv[2]
    rank = kind(folder, phase)
    rank.start()
    if phase == "resume":
        rank.resume()
        rank.end()
        return
    rank.train_plainly()
    rank.initialize()
    rank.replay()
    rank.train()
    rank.compare()
    rank.lose_worker()
    if rank.found.death is None:
        rank.end()
