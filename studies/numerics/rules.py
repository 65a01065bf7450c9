"""The rules of the study, by name."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from studies.numerics.ours import WHOLE, Ours
from studies.numerics.relatives import ACCO, Delay, Disturbed, Feedback, Momentum, SAPipe
from studies.numerics.rule import AdamW, Rule, Start

REFERENCE = "adamw"
CONTROL = "adamw-disturbed"
UPSTREAM = ("upstream-sequential", "upstream-overlapped")
"""Upstream's ZenFlow runs through DeepSpeed itself (`through_deepspeed`), not through a `Rule`."""

RULES: dict[str, Callable[[Start], Rule]] = {
    REFERENCE: AdamW,
    CONTROL: Disturbed,
    "ours-1": partial(Ours, interval=1),
    "ours-2": partial(Ours, interval=2),
    "ours-4": partial(Ours, interval=4),
    "ours-8": partial(Ours, interval=8),
    "ours-1-one-mean": partial(Ours, interval=1, block_size=WHOLE),
    "ours-1-exact-v": partial(Ours, interval=1, block_size=1),
    "ours-4-one-mean": partial(Ours, interval=4, block_size=WHOLE),
    "ours-4-exact-v": partial(Ours, interval=4, block_size=1),
    "ours-1-from-40": partial(Ours, interval=1, warm_up_steps=40),
    "ours-2-from-40": partial(Ours, interval=2, warm_up_steps=40),
    "ours-4-from-40": partial(Ours, interval=4, warm_up_steps=40),
    "ours-4-blocks-8": partial(Ours, interval=4, block_size=8),
    "delay": Delay,
    "feedback": Feedback,
    "momentum": Momentum,
    "sapipe": SAPipe,
    "acco": ACCO,
}
SPLITTING = ("sapipe", "acco")
"""Rules whose ranks have weights of their own; they need a setting with at least two ranks."""
