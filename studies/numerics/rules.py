"""The rules of the study, by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial

import torch

from studies.numerics.lion import Lion, LionBf16, LionDelay, LionMeans, LionSigns
from studies.numerics.ours import WHOLE, Ours
from studies.numerics.relatives import ACCO, Delay, Disturbed, Feedback, Momentum, SAPipe
from studies.numerics.rule import AdamW, NAdam, Rule, Start

REFERENCE = "adamw"
CONTROL = "adamw-disturbed"
UPSTREAM = ("upstream-sequential", "upstream-overlapped")
"""Upstream's ZenFlow runs through DeepSpeed itself (`through_deepspeed`), not through a `Rule`."""


def _with_beta1(rule: Callable[[Start], Rule], beta1: float, start: Start) -> Rule:
    return rule(replace(start, hyper=replace(start.hyper, beta1=beta1)))


def _retired(start: Start) -> Rule:
    raise ValueError("intervals above 1 are retired: their rows are of commit ebc96141 and before")


RETIRED = (
    "ours-2",
    "ours-4",
    "ours-8",
    "ours-4-one-mean",
    "ours-4-exact-v",
    "ours-2-from-40",
    "ours-4-from-40",
    "ours-4-blocks-8",
    "ours-2-dithered",
    "ours-4-dithered",
)
"""Rules of stored rows that have no code any more."""

# Estimates are dithered since amendment 12. The stored rows of rules whose names do not say so
# rounded to the nearest.
RULES: dict[str, Callable[[Start], Rule]] = {
    **dict.fromkeys(RETIRED, _retired),
    REFERENCE: AdamW,
    CONTROL: Disturbed,
    "ours-1": Ours,
    "ours-1-one-mean": partial(Ours, block_size=WHOLE),
    "ours-1-exact-v": partial(Ours, block_size=1),
    "ours-1-from-40": partial(Ours, warm_up_steps=40),
    "adamw-bf16": partial(AdamW, moments=torch.bfloat16),
    "ours-1-bf16": partial(Ours, moments=torch.bfloat16),
    "ours-1-bf16-from-40": partial(Ours, warm_up_steps=40, moments=torch.bfloat16),
    "adamw-int8": partial(AdamW, moments=torch.int8, block_size=32),
    "ours-1-int8-from-40": partial(Ours, warm_up_steps=40, moments=torch.int8),
    "ours-1-dithered": partial(Ours, warm_up_steps=40),
    "ours-1-dithered-from-2": partial(Ours, warm_up_steps=2),
    "ours-1-dithered-from-10": partial(Ours, warm_up_steps=10),
    "ours-1-dithered-from-20": partial(Ours, warm_up_steps=20),
    "delay": Delay,
    "feedback": Feedback,
    "momentum": Momentum,
    "sapipe": SAPipe,
    "acco": ACCO,
    "adamw-beta1-0.95": partial(_with_beta1, AdamW, 0.95),
    "delay-beta1-0.95": partial(_with_beta1, Delay, 0.95),
    "adamw-beta1-0.975": partial(_with_beta1, AdamW, 0.975),
    "delay-beta1-0.975": partial(_with_beta1, Delay, 0.975),
    "nadam": NAdam,
    "lion": Lion,
    "lion-delay": LionDelay,
    "lion-bf16": LionBf16,
    "lion-signs": LionSigns,
    "lion-means": LionMeans,
}
SPLITTING = ("sapipe", "acco")
"""Rules whose ranks have weights of their own; they need a setting with at least two ranks."""
REFERENCES = ("adamw-beta1-0.95", "adamw-beta1-0.975", "lion")
"""Rules beside `REFERENCE` with which others are compared."""


def reference_of(rule: str) -> str:
    """The rule with which `rule` is compared; a reference is its own."""
    family, _, rest = rule.partition("-")
    named = f"adamw-{rest}" if rest.startswith("beta1-") else family
    return named if named in REFERENCES else REFERENCE


def with_references(rules: Iterable[str]) -> tuple[str, ...]:
    """`rules` behind those with which they are compared, each once."""
    rules = tuple(rules)
    return tuple(dict.fromkeys([*map(reference_of, rules), *rules]))
