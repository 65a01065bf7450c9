"""Hyperparameters that a script changes in mid-run are used in the next step, or refused by name
before it."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch

from deepspeed_ext.errors import ConfigError
from deepspeed_ext.zenflow.optimizers.adam import AdamKind
from deepspeed_ext.zenflow.optimizers.interface import OptimizerKind
from deepspeed_ext.zenflow.optimizers.lion import LionKind
from tests.support.linear import LinearNet, Plain, drawn_loss
from tests.support.ranks import run_ranks
from tests.support.zenflow import full_masters_of, make_engine, zenflow_config

VALUES: dict[str, list[Any]] = {
    "lr": [0.0, 1e-4, 3e-2],
    "betas": [
        (0.0, 0.0),
        (0.0, 0.99),
        (0.5, 0.2),
        (0.9, 0.5),
        (0.9, 0.9999),
        (0.99, 0.9),
        (0.999, 0.999),
    ],
    "eps": [1e-12, 1e-3],
    "weight_decay": [0.0, 0.5],
    "maximize": [True, False],
}


def differences(stage: int, seed: int, steps: int) -> float:
    """Change a hyperparameter before most steps; the largest difference of a master from
    torch's."""
    draw = random.Random(seed)
    config = zenflow_config(stage, torch.float32) | {"gradient_clipping": 0.0}
    engine, plain = make_engine(config, model=LinearNet), Plain(lr=1e-3, weight_decay=0.0)
    for group in plain.optimizer.param_groups:  # the same start, whatever the config says
        group.update(
            {
                key: engine.optimizer.param_groups[0][key]
                for key in ("lr", "betas", "eps", "weight_decay")
            }
        )
    for number in range(steps):
        if number > 2 and draw.random() < 0.7:
            name = draw.choice(list(VALUES))
            value = draw.choice(VALUES[name])
            for group in (*engine.optimizer.param_groups, *plain.optimizer.param_groups):
                group[name] = value
        for side in (engine, plain):
            side.backward(drawn_loss(side, number))
            side.step()
    masters, expected = full_masters_of(engine), [p.detach() for p in plain.module.parameters()]
    found = max(
        float((a.view(-1) - b.view(-1)).abs().max()) for a, b in zip(masters, expected, strict=True)
    )
    engine.destroy()
    return found


@pytest.mark.parametrize("stage", [1, 3])
def test_the_masters_are_those_of_torchs_adamw_whatever_is_changed(stage: int) -> None:
    for seed in range(4):
        (found,) = run_ranks(1, differences, stage, seed, 16)
        assert found < 5e-6, seed


def refusals(stage: int) -> list[str]:
    engine = make_engine(zenflow_config(stage, torch.float32), model=LinearNet)
    said = []
    for number, (name, value) in enumerate(
        [("amsgrad", True), ("betas", (0.9, 0.0)), ("betas", (0.9, 1.0)), ("betas", (-0.1, 0.9))]
    ):
        engine.backward(drawn_loss(engine, number))
        (group,) = engine.optimizer.param_groups
        before = group.get(name)
        group[name] = value
        try:
            engine.step()
            said.append("")
        except ConfigError as error:
            said.append(str(error))
        group[name] = before
        engine.step()  # nothing has changed
    assert engine.global_steps == 4
    engine.destroy()
    return said


@pytest.mark.parametrize("stage", [2, 3])
def test_what_the_worker_cannot_step_with_is_refused_by_name_and_the_step_is_still_there(
    stage: int,
) -> None:
    ((amsgrad, forgets, one, negative),) = run_ranks(1, refusals, stage)
    assert "amsgrad=True (parameter group 0" in amsgrad
    assert "betas=(0.9, 0)" in forgets
    assert "overlap_step" in forgets
    assert "betas=(0.9, 1), but each must be at least 0 and below 1" in one
    assert "betas=(-0.1, 0.9)" in negative


def kind_of(kind: type[OptimizerKind]) -> tuple[OptimizerKind, dict[str, Any]]:
    """An optimizer of this kind, and its group as a checkpoint has it."""
    ours = kind.__new__(kind)  # DeepSpeed's Lion would be compiled
    ours.optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(2))])
    vars(ours)["is_decoupled"] = True
    return ours, dict(ours.optimizer.param_groups[0])


of_both = pytest.mark.parametrize("kind", [AdamKind, LionKind])
OF_ADAM: list[tuple[str, Any]] = [("amsgrad", True), ("eps", math.nan), ("eps", [1e-8])]
OF_ADAM += [("betas", betas) for betas in ((1.0, 0.9), (1.5, 0.9), (-0.1, 0.9), (0.9, 1.0))]
REFUSED: list[tuple[str, Any]] = []
REFUSED += [("lr", value) for value in ("", [1e-3], None, math.inf, math.nan, 10**400)]
REFUSED += [("betas", value) for value in (0.9, None, (0.9, math.nan), (0.9,))]
REFUSED += [("weight_decay", value) for value in (math.inf, "much")]


@of_both
@pytest.mark.parametrize(("name", "value"), [*OF_ADAM, *REFUSED])
def test_what_cannot_be_stepped_with_is_refused_in_a_run_and_in_a_load(
    kind: type[OptimizerKind], name: str, value: Any
) -> None:
    ours, group = kind_of(kind)
    loaded = [group, {**group, name: value}]
    if kind is LionKind and (name, value) in OF_ADAM:  # it has none, or other bounds
        ours.require_steppable(predicts=True, groups=loaded)
        return
    with pytest.raises(ConfigError, match="parameter group 1 of "):
        ours.require_steppable(predicts=True, groups=loaded)
    ours.require_steppable(predicts=True)  # its own are as they were
    ours.optimizer.param_groups[0][name] = value
    with pytest.raises(ConfigError, match="parameter group 0 of "):
        ours.require_steppable(predicts=False)


@of_both
def test_options_without_effect_tensors_and_numbers_in_words_are_taken(
    kind: type[OptimizerKind],
) -> None:
    ours, group = kind_of(kind)
    options = dict.fromkeys(("fused", "foreach", "capturable", "differentiable", "maximize"), True)
    tensors = {"lr": torch.tensor([1e-3]), "betas": torch.tensor([0.9, 0.99]), "of_mine": object()}
    learning_rates = ({"lr": torch.tensor(1e-3)}, {"lr": 0}, {"lr": "1e-3"})
    for changes in (options, {"amsgrad": False}, *learning_rates, tensors):
        ours.require_steppable(predicts=True, groups=[{**group, **changes}])
    del group["amsgrad"]
    ours.require_steppable(predicts=True, groups=[group])


def test_what_predicts_nothing_takes_any_beta2() -> None:
    kind = AdamKind(torch.optim.AdamW([torch.nn.Parameter(torch.zeros(2))], betas=(0.9, 0.0)))
    kind.require_steppable(predicts=False)
    with pytest.raises(ConfigError, match="beta2"):
        kind.require_steppable(predicts=True)
