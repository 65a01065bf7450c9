"""One training of the reference task, as every rank runs it."""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator

from tests.perf.language_model import SHAPES, Corpus, Llama, batches
from tests.perf.sides import Side, engine_of, parameters_of, rank_and_size


@dataclass(frozen=True)
class Training:
    """What to train; equal values give the same training, up to rounding.

    Attributes:
        seed: of the data; the initial weights are the same for every seed.
        model: one of `language_model.SHAPES`.
        start: file of weights to start from; None: from the initial ones.
        keep: file to which the weights after `keep_after` steps go, if given.
    """

    side: Side
    lr: float
    seed: int
    steps: int
    stage: int = 2
    ranks: int = 1
    corpus: Corpus = "standard library"
    weight_decay: float = 0.1
    start: str | None = None
    keep: str | None = None
    keep_after: int = 0
    model: str = "tiny"

    def key(self) -> dict[str, Any]:
        """What identifies the training in a stored result."""
        values = dataclasses.asdict(self)
        del values["keep"], values["keep_after"]
        del values["side"]["native"]  # the kernels agree to rounding
        if self.model == "tiny":
            del values["model"]
        return values | {"start": self.start and Path(self.start).name}


def new_model(start: str | None = None, model: str = "tiny") -> Llama:
    """A model with its initial weights, or those of a file."""
    torch.manual_seed(0)
    llama = Llama(SHAPES[model])
    if start is not None:
        llama.load_state_dict(torch.load(start))
    return llama


def train(training: Training) -> dict[str, list[float]]:
    """Body of a rank: this rank's loss of every step, and the seconds since the first began at
    which it ended."""
    rank, world_size = rank_and_size()
    device = get_accelerator().current_device_name()
    losses, seconds = [], []
    settings = {"lr": training.lr, "weight_decay": training.weight_decay, "stage": training.stage}
    shape, model = SHAPES[training.model], new_model(training.start, training.model)
    with engine_of(
        training.side, model, micro_batch=shape.batch // world_size, **settings
    ) as engine:
        begin = time.perf_counter()
        data = batches(training.corpus, training.seed, training.steps, rank, world_size, shape)
        for step, tokens in enumerate(data, start=1):
            loss = engine(tokens.to(device))
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
            seconds.append(time.perf_counter() - begin)
            if training.keep is not None and step == training.keep_after:
                Path(training.keep).parent.mkdir(parents=True, exist_ok=True)
                torch.save(
                    {name: value.float().cpu() for name, value in parameters_of(engine)},
                    training.keep,
                )
    return {"losses": losses, "seconds": seconds}


def untrained(corpus: Corpus, seed: int, steps: int, start: str) -> list[float]:
    """Body of a rank: the loss of every batch under the weights of a file, in bf16 as in
    training."""
    device = get_accelerator().current_device_name()
    model = new_model(start).bfloat16().to(device)
    with torch.no_grad():
        return [model(tokens.to(device)).item() for tokens in batches(corpus, seed, steps)]


def changed_by_initialize(side: Side, stage: int) -> int:
    """Body of a rank: how many elements of the model's weights `initialize` alone changes."""
    before = {name: value.detach().bfloat16() for name, value in new_model().named_parameters()}
    with engine_of(
        side, new_model(), micro_batch=SHAPES["tiny"].batch, lr=1e-3, weight_decay=0.1, stage=stage
    ) as engine:
        after = {name: value.cpu() for name, value in parameters_of(engine)}
    return sum(
        int((after[name].view(torch.int16) != value.view(torch.int16)).sum())
        for name, value in before.items()
    )
