"""The tasks of the study, by name."""

from __future__ import annotations

from studies.numerics.language import Bytes, Embeddings, Experts
from studies.numerics.other_tasks import Digits, Reactions
from studies.numerics.task import Injection, Task

TASKS: dict[str, Task] = {
    "bytes-1m": Bytes(),
    "bytes-5m": Bytes(shape="5m", selection="steps-100"),
    "bytes-20m": Bytes(shape="20m", selection="steps-100", rates=(2.5e-4, 5e-4, 1e-3)),
    "spikes": Bytes(injection=Injection(every=40, factor=10.0)),
    "embeddings": Embeddings(rates=(1e-3, 2e-3, 4e-3)),
    "experts": Experts(rates=(1e-3, 2e-3, 4e-3)),
    "digits": Digits(batch=32, margin="improvement"),
    "reactions": Reactions(
        rates=(3e-5, 1e-4, 3e-4),
        selection="steps-100",
        weight_decay=0.0,
        margin="improvement",
        limit=3.0,
    ),
    "toy": Bytes(shape="toy", batch=4),
}
BORROWED_RATES = {"spikes": "bytes-1m"}
"""Tasks that take the learning rate of another."""
