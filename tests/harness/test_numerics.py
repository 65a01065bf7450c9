"""The harness of the numerics study trains what it says: ours is the engine's rule, AdamW is
torch's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from studies.numerics import table
from studies.numerics.rows import Row
from studies.numerics.rule import AdamW, Gradient, Hyper, Start
from studies.numerics.rules import RETIRED, RULES
from studies.numerics.settings import SETTINGS, Setting
from studies.numerics.through_deepspeed import run_engine
from studies.numerics.training import Training, bounds_of
from tests.perf import report, sides
from tests.perf.sides import Side
from tests.support.paths import ROOT

STEPS = 30
RATE = 5e-3
SAME = Setting(steps=STEPS, clip=0.0, compute="weights")
"""As the engine computes, without a norm, which DeepSpeed sums in another order."""


@pytest.fixture(autouse=True)
def _own_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "ROOT", tmp_path)
    monkeypatch.delenv("OUT", raising=False)
    monkeypatch.setitem(SETTINGS, "short", Setting(steps=8))


def harness(rule: str, setting: Setting, monkeypatch: pytest.MonkeyPatch) -> Training:
    monkeypatch.setitem(SETTINGS, "test", setting)
    training = Training(Row("toy", rule, "test", 0, RATE))
    training.run()
    return training


@pytest.mark.full
@pytest.mark.parametrize(("rule", "side"), [("ours-1", sides.PREDICTIVE), ("adamw", sides.ADAMW)])
def test_a_rule_equals_the_engine(rule: str, side: Side, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ours to the bit; AdamW is torch's there, which rounds in another order than the pass."""
    expected = run_engine(side, "toy", SAME, 0, RATE)[0]
    training = harness(rule, SAME, monkeypatch)
    tolerance = 5e-3 if rule == "adamw" else 0.0
    assert training.progress.losses == pytest.approx(expected.losses, abs=tolerance)
    found = training.rule.weights().float()
    assert torch.equal(found, expected.weights) or (
        rule == "adamw" and (found - expected.weights).abs().max() < 0.02
    )


def _gradients(numel: int, steps: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(numel, generator=generator, dtype=torch.float32) for _ in range(steps)]


def _start(numel: int, ranks: int = 1, beta2: float = 0.95) -> Start:
    masters = torch.linspace(-1, 1, numel, dtype=torch.float32)
    return Start(masters, Hyper(beta2, 0.1), torch.float32, bounds_of(numel, ranks))


def _fed(rule: Any, gradients: list[torch.Tensor], shares: int = 1) -> list[list[torch.Tensor]]:
    """The weights of every rank after every step."""
    seen = []
    for gradient in gradients:
        parts = tuple(gradient * (1 + 0.5 * (rank - (shares - 1) / 2)) for rank in range(shares))
        rule.step(Gradient(gradient.clone(), parts, 1.0, 1e-2))
        seen.append([rule.weights(rank).clone() for rank in range(shares)])
    return seen


def test_adamw_is_torchs() -> None:
    start, gradients = _start(100), _gradients(100, 5)
    weights = torch.nn.Parameter(start.masters.clone())
    optimizer = torch.optim.AdamW([weights], lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)
    for gradient, found in zip(gradients, _fed(AdamW(start), gradients), strict=True):
        weights.grad = gradient.clone()
        optimizer.step()
        torch.testing.assert_close(found[0], weights.detach(), rtol=1e-6, atol=1e-6)


def test_relatives_follow_their_equations() -> None:
    gradients = _gradients(100, 6)
    exact = [weights[0] for weights in _fed(AdamW(_start(100)), gradients)]
    ranks = _start(100, 2)
    delay = _fed(RULES["delay"](_start(100)), gradients)
    feedback = _fed(RULES["feedback"](_start(100)), gradients)
    sapipe = _fed(RULES["sapipe"](ranks), gradients, shares=2)
    acco = _fed(RULES["acco"](ranks), gradients, shares=2)
    for t in range(2, 6):
        assert torch.equal(delay[t][0], exact[t - 1])
        torch.testing.assert_close(
            feedback[t][0], 2 * exact[t - 1] - exact[t - 2], rtol=0, atol=1e-6
        )
        assert torch.equal(acco[t][1], exact[t])
        assert not torch.equal(acco[t][0], exact[t])
        assert not torch.equal(sapipe[t][0], sapipe[t][1])
        assert (sapipe[t][0] - exact[t]).abs().max() < (delay[t][0] - exact[t]).abs().max()
    for rule in (delay, feedback, sapipe, acco):
        assert torch.equal(rule[0][0], exact[0]), "the first update is waited for"


def test_every_rule_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SETTINGS, "test", Setting(steps=10, ranks=2))
    for rule in RULES.keys() - RETIRED:
        training = Training(Row("toy", rule, "test", 0, RATE))
        training.run()
        assert training.progress.losses[-1] < training.progress.losses[0], rule


def test_the_tables_of_the_page_are_those_of_the_stored_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(report, "ROOT", ROOT)
    assert table.current() == table.page().read_text(), "run `python -m studies.numerics --table`"
