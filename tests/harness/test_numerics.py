"""The harness of the numerics study trains what it says: ours is the engine's rule, AdamW is
torch's."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from studies.numerics import __main__ as command
from studies.numerics import analysis, plots, rows, student, table
from studies.numerics.language import RareExperts
from studies.numerics.rows import Row, store, stored
from studies.numerics.rule import AdamW, Gradient, Hyper, NAdam, Start
from studies.numerics.rules import RETIRED, RULES, SPLITTING
from studies.numerics.settings import SETTINGS, Setting
from studies.numerics.tasks import TASKS
from studies.numerics.through_deepspeed import run_engine
from studies.numerics.training import Training, bounds_of, clip_factor
from tests.perf import report, sides
from tests.perf.sides import Side
from tests.support.paths import ROOT

GREYS = {"#000000", "#cccccc"}
"""Of frames, and of the rules that have no colour of their own."""

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


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("rule", "side"),
    [("ours-1", sides.PREDICTIVE), ("adamw", sides.ADAMW)],
)
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


def test_clipped_and_on_two_ranks_it_stays_close_to_the_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The norm is summed in another order, and gloo's sums may round differently."""
    setting = replace(SAME, clip=1.0, ranks=2)
    ranks = run_engine(sides.PREDICTIVE, "toy", setting, 0, RATE, ranks=2)
    expected = [sum(values) / 2 for values in zip(*(rank.losses for rank in ranks), strict=True)]
    found = harness("ours-1", setting, monkeypatch).progress.losses
    assert found == pytest.approx(expected, abs=2e-2)
    other = harness("delay", setting, monkeypatch).progress.losses
    assert max(abs(a - b) for a, b in zip(other, expected, strict=True)) > 2e-2, (
        "the tolerance tells rules apart"
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


def test_nadam_takes_the_unscaled_gradient_and_the_rate_of_the_step() -> None:
    start, gradients = _start(100), _gradients(100, 5)
    rule, weights = NAdam(start), torch.nn.Parameter(start.masters.clone())
    options: dict[str, Any] = {"betas": (0.9, 0.95), "weight_decay": 0.1}
    theirs = torch.optim.NAdam([weights], **options, decoupled_weight_decay=True)
    for number, gradient in enumerate(gradients, 1):
        theirs.param_groups[0]["lr"] = 1e-2 / number
        weights.grad = gradient.clone()
        theirs.step()
        rule.step(Gradient(4 * gradient, (gradient,), 0.25, 1e-2 / number))
        assert torch.equal(rule.weights(), weights.detach())


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


def test_momentum_is_the_exact_update_if_the_gradient_is_zero() -> None:
    gradients = _gradients(100, 200)  # so many that v changes little in the last step
    gradients[-1].zero_()
    exact = _fed(AdamW(_start(100, beta2=0.9999)), gradients)[-1][0]
    momentum = _fed(RULES["momentum"](_start(100, beta2=0.9999)), gradients)[-1][0]
    torch.testing.assert_close(momentum, exact, rtol=0, atol=2e-5)


def test_with_v_itself_ours_is_closer_to_adamw_than_with_one_mean() -> None:
    scales = torch.logspace(-2, 2, 128, dtype=torch.float32)
    gradients = [gradient * scales for gradient in _gradients(128, 8)]
    exact = _fed(AdamW(_start(128)), gradients)[-1][0]
    distance = {
        rule: (_fed(RULES[rule](_start(128, ranks=2)), gradients)[-1][0] - exact).norm().item()
        for rule in ("ours-1-exact-v", "ours-1", "ours-1-one-mean")
    }
    assert distance["ours-1-exact-v"] < distance["ours-1"] < distance["ours-1-one-mean"]


def test_every_rule_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SETTINGS, "test", Setting(steps=10, ranks=2))
    for rule in RULES.keys() - RETIRED:
        training = Training(Row("toy", rule, "test", 0, RATE))
        training.run()
        assert training.progress.losses[-1] < training.progress.losses[0], rule


@pytest.mark.parametrize("rule", ["ours-1", "feedback", "acco", "nadam"])
def test_an_interrupted_row_continues_to_the_bit(
    rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SETTINGS, "test", Setting(steps=26, ranks=2, weights="float16"))
    row = Row("toy", rule, "test", 0, RATE)
    whole, first = Training(row), Training(row)
    whole.run()
    for _ in range(23):
        first.progress.losses.append(first.step())
    path = command._unfinished(row)
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(first.progress, path)
    assert command.run(row)
    found = stored(row)
    assert found is not None
    assert found["losses"] == [round(loss, 5) for loss in whole.progress.losses]
    assert not path.exists()


def test_overflow_skips_the_step_and_halves_the_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    training = harness("ours-1", Setting(steps=12, weights="float16"), monkeypatch)
    scale = training.progress.loss_scale
    assert scale.overflows > 0
    assert training.rule.updates == 12 - scale.overflows
    assert clip_factor(norm=8.0, loss_scale=4.0, limit=1.0) == pytest.approx(1 / 8.0)
    assert clip_factor(norm=8.0, loss_scale=4.0, limit=0.0) == 1 / 4.0


def test_rows_are_kept_and_reused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    row = Row("toy", "ours-1", "short", 0, RATE)
    monkeypatch.setattr(command, "planned", lambda: [("main", row)])
    assert command.main(["--rows", "main"]) == 0
    result = stored(row)
    assert result is not None
    assert len(result["losses"]) == 8
    assert result["held_out"] < result["held_out_before"]
    assert {"commit", "date", "versions", "load"} <= set(result["made"])
    assert row.name in capsys.readouterr().out
    assert command.main(["--rows", "main"]) == 0
    assert row.name not in capsys.readouterr().out, "nothing is trained twice"
    assert command.main(["--rows", "main", "--again", "--minutes", "0"]) == 75, "time ran out"


def test_adamw_alone_chooses_the_learning_rate() -> None:
    candidates = rows.selection_rows("bytes-1m")
    with pytest.raises(rows.NoRateError, match="--rows rates"):
        rows.rate_of(Row("spikes", "ours-1", "base", 0))
    for candidate, loss in zip(candidates, (2.0, 1.5, 1.7), strict=True):
        store(candidate, {"losses": [loss], "diverged": False})
    assert rows.rate_of(Row("spikes", "ours-1", "base", 0)) == candidates[1].rate
    assert all(row.rule == "adamw" and row.seed == rows.SELECTION_SEED for row in candidates)


def test_the_plan_can_be_run() -> None:
    planned = rows.planned()
    assert len({row for _, row in planned}) == len(planned)
    for _, row in planned:
        assert SETTINGS[row.setting].ranks > 1 or row.rule not in SPLITTING
        assert row.rule in RULES or row.rule.startswith("upstream")
        examples = TASKS[row.task].batch * SETTINGS[row.setting].batch
        assert examples % SETTINGS[row.setting].ranks == 0
    sizes = {
        name: sum(p.numel() for p in TASKS[name].model().parameters())
        for name in ("bytes-1m", "bytes-5m")
    }
    assert sizes["bytes-1m"] == pytest.approx(0.86e6, rel=0.01)
    assert sizes["bytes-5m"] == pytest.approx(4.9e6, rel=0.01)


def test_rare_experts_are_rare() -> None:
    model = RareExperts()
    tokens = TASKS["experts"].batch_of(0, 1, 400, 64)[0][0]
    share = model._experts_of(tokens).flatten().bincount(minlength=model.experts) / tokens.numel()
    assert share[0] == pytest.approx(0.5, abs=0.1)
    assert share[-1] < 0.01


def test_student_agrees_with_its_tables() -> None:
    assert student.upper_tail(2.920, 2) == pytest.approx(0.05, abs=1e-4)
    assert student.upper_tail(6.314, 1) == pytest.approx(0.05, abs=1e-4)
    assert student.upper_tail(-2.015, 5) == pytest.approx(0.95, abs=1e-4)
    assert student.quantile(0.95, 2) == pytest.approx(2.920, abs=1e-3)


@pytest.mark.parametrize(
    ("gaps", "expected"),
    [
        ((2.0, 2.1, 2.2), "refuted"),
        ((0.1, 0.2, 0.0), "upheld"),
        ((2.0, -1.9, 3.1), "open"),
        ((2.0,), "open"),
    ],
)
def test_verdicts_follow_the_plan(gaps: tuple[float, ...], expected: str) -> None:
    assert analysis.Sample(gaps).verdict(1.0) == expected


def test_tables_show_gaps_and_leave_the_rest_empty(tmp_path: Path) -> None:
    for seed in range(3):
        for rule, loss in (("adamw", 2.0), ("ours-1", 2.01 + 0.001 * seed), ("delay", 2.2)):
            end = {
                "losses": [loss] * 60,
                "held_out": loss,
                "held_out_before": 5.0,
                "diverged": False,
                "rate": 1e-3,
            }
            store(Row("bytes-1m", rule, "base", seed), end)
    store(
        Row("bytes-1m", "ours-4", "base", 0),
        {"losses": [9.0], "held_out": None, "diverged": True, "rate": 1e-3},
    )
    page = tmp_path / "docs" / "results" / "numerics.md"
    page.parent.mkdir(parents=True)
    page.write_text(
        "".join(
            f"{table.BEGIN.format(n)}\nold\n{table.END.format(n)}\n"
            for n in ("trends", "contrasts", "rates")
        )
    )
    table.write()
    written = [
        line
        for line in table.rows_table().splitlines()
        if "| bytes-1m | base |" in line and "of 3" in line
    ]
    # the same rules with other seeds
    found = [line for line in written if not line.startswith("| rounded")]
    lines = {line.split(" | ")[3]: line for line in found}
    assert "| +0.55 |" in lines["ours-1"]
    assert lines["ours-1"].endswith("| upheld |")
    assert "| +10.00 |" in lines["delay"]
    assert "1 of 3, 1 diverged" in lines["ours-4"]
    assert lines["ours-4"].endswith("| refuted |")
    assert "0 of 3" in lines["ours-8"]
    assert "| H3 | base | delay | ours-1 | 3 | +9.45 |" in page.read_text()
    assert "old" not in page.read_text()


def test_the_tables_of_the_page_are_those_of_the_stored_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(report, "ROOT", ROOT)
    assert table.current() == table.page().read_text(), "run `python -m studies.numerics --table`"


def test_figures_are_drawn_of_what_is_there(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for rule in ("adamw", "ours-1"):
        losses = [5.0 - 0.01 * step for step in range(100)]
        store(
            Row("bytes-1m", rule, "base", 0),
            {"losses": losses, "seconds": [1.0, 2.0], "diverged": False},
        )
    (tmp_path / "docs" / "results").mkdir(parents=True)
    drawn = plots.draw()
    assert [path.name for path in drawn] == ["numerics_bytes-1m_base.svg"]
    text = drawn[0].read_text()
    plots.draw()
    assert drawn[0].read_text() == text, "the same file for the same rows"


def test_a_figure_of_many_rules_has_few_colours() -> None:
    figures = list((ROOT / "docs" / "results").glob("numerics_*.svg"))
    colours = {
        path.name: set(re.findall(r"stroke: (#[0-9a-f]{6})", path.read_text())) - GREYS
        for path in figures
    }
    assert len(colours) > 10
    assert [
        name for name, found in colours.items() if not 2 <= len(found) <= plots.MOST_COLORS
    ] == []
