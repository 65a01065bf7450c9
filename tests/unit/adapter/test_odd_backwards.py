"""Random programs of what scripts do with backward passes, against plain autograd and torch's AdamW
in fp32."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from deepspeed_ext.errors import StateError
from tests.support.linear import Bomb, LinearNet, Plain, drawn_loss, leaf
from tests.support.ranks import run_ranks
from tests.support.zenflow import full_masters_of, make_engine, zenflow_config

pytestmark = pytest.mark.sampled()

LR, DECAY = 1e-2, 0.1


class EarlyError(Exception):
    """Raised before any gradient is there."""


def backward(side: Any, loss: torch.Tensor, plain: bool) -> None:
    if plain:
        loss.backward()
    else:
        side.backward(loss)


def once(side: Any, seed: int, plain: bool) -> None:
    backward(side, drawn_loss(side, seed), plain)


def of_the_bare_module(side: Any, seed: int, plain: bool) -> None:
    """Its outputs have no hook of DeepSpeed's, like those in an object of an unknown class."""
    loss = side.module(leaf(side), seed).sum()
    side.backward(loss / getattr(side, "accumulation", 1))  # an engine divides by itself


def twice_in_one_loss(side: Any, seed: int, plain: bool) -> None:
    backward(side, drawn_loss(side, seed) + drawn_loss(side, seed + 1), plain)


def two_forwards_then_two_passes(side: Any, seed: int, plain: bool) -> None:
    first, second = drawn_loss(side, seed), drawn_loss(side, seed + 1)
    backward(side, second, plain)
    backward(side, first, not plain)


def what_comes_after_zero_grad(side: Any, seed: int, plain: bool) -> None:
    once(side, seed, plain)
    side.optimizer.zero_grad(set_to_none=False)
    once(side, seed + 1, plain)


def gradient_of_an_input(side: Any, seed: int, plain: bool) -> None:
    x = leaf(side)
    (gradient,) = torch.autograd.grad(side(x, seed).sum(), x)
    assert gradient.numel() == 1


def through_frozen_parameters(side: Any, seed: int, plain: bool) -> None:
    """The generator's loss of a GAN whose discriminator this is."""
    side.module.requires_grad_(False)
    x = leaf(side)
    side(x, seed).sum().backward()
    assert x.grad is not None
    side.module.requires_grad_(True)


def with_a_frozen_layer(side: Any, seed: int, plain: bool) -> None:
    layer = side.module.layers[seed % 4]
    layer.weight.requires_grad_(False)
    once(side, seed, plain)
    layer.weight.requires_grad_(True)


def with_a_hook_on_a_gradient(side: Any, seed: int, plain: bool) -> None:
    handle = side.module.layers[seed % 4].bias.register_hook(lambda gradient: gradient * 3)
    once(side, seed, plain)
    handle.remove()


def checkpointed(side: Any, seed: int, plain: bool) -> None:
    backward(side, checkpoint(side, leaf(side), seed, use_reentrant=False).sum(), plain)


def checkpointed_reentrantly(side: Any, seed: int, plain: bool) -> None:
    backward(side, checkpoint(side, leaf(side), seed, use_reentrant=True).sum(), plain)


def inside_another_backward(side: Any, seed: int, plain: bool) -> None:
    """GradCache: the hook of another loss runs the model again, part by part."""
    loss = leaf(side).sum() * 1.0

    def parts(gradient: torch.Tensor) -> None:
        with torch.enable_grad():
            for number in (seed, seed + 1):
                drawn_loss(side, number).backward()

    loss.register_hook(parts)
    loss.backward()


def an_exception_before_any_gradient(side: Any, seed: int, plain: bool) -> None:
    y = side(leaf(side), seed)

    def refuses(gradient: torch.Tensor) -> None:
        raise EarlyError

    y.register_hook(refuses)
    with pytest.raises(EarlyError):
        backward(side, y.sum(), plain)
    with pytest.raises((AssertionError, RuntimeError)):
        backward(side, torch.zeros(2), plain)
    side(leaf(side), seed)  # until a forward outside of passes, the pass counts as running


MICRO_STEPS: list[Callable[[Any, int, bool], None]] = [
    once,
    of_the_bare_module,
    twice_in_one_loss,
    two_forwards_then_two_passes,
    what_comes_after_zero_grad,
    gradient_of_an_input,
    through_frozen_parameters,
    with_a_frozen_layer,
    with_a_hook_on_a_gradient,
    checkpointed,
    checkpointed_reentrantly,
    inside_another_backward,
    an_exception_before_any_gradient,
]


def differing(
    stage: int, fields: dict[str, Any], accumulation: int, seed: int
) -> tuple[float, list[str]]:
    """The largest difference of a master after a random program, and the program."""
    draw = random.Random(seed)
    config = zenflow_config(stage, torch.float32, accumulation=accumulation, lr=LR, **fields)
    config["optimizer"]["params"] |= {"weight_decay": DECAY, "betas": [0.9, 0.999], "eps": 1e-8}
    engine = make_engine(config | {"gradient_clipping": 0.0}, model=LinearNet)
    plain, program = Plain(LR, DECAY, accumulation), []
    for number in range(4 * accumulation):
        parts = draw.choices(MICRO_STEPS, k=draw.choice([1, 1, 2]))
        # no pass ends, so a step would be refused
        if set(parts) == {an_exception_before_any_gradient}:
            parts.append(once)
        for part, micro_step in enumerate(parts):
            arguments = 10 * number + 4 * part, draw.random() < 0.5
            program.append(f"{micro_step.__name__}{arguments}")
            for side in (engine, plain):
                micro_step(side, *arguments)
        for side in (engine, plain):
            side.step()
    pairs = zip(full_masters_of(engine), plain.module.parameters(), strict=True)
    found = max(float((a.view(-1) - b.detach().view(-1)).abs().max()) for a, b in pairs)
    engine.destroy()
    return found, program


def wrong_programs(
    stage: int, fields: dict[str, Any], accumulation: int, seeds: range
) -> list[Any]:
    wrong = []
    for seed in seeds:
        found, program = differing(stage, fields, accumulation, seed)
        if not found < 3e-6:
            wrong.append((seed, found, program))
    return wrong


CASES = [(stage, accumulation) for stage in (1, 2, 3) for accumulation in (1, 2)]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("seeds", [range(6), pytest.param(range(6, 200), marks=pytest.mark.full)])
@pytest.mark.parametrize(("stage", "accumulation"), CASES)
def test_odd_backward_passes_train_as_plain_autograd_does(
    stage: int, accumulation: int, seeds: range
) -> None:
    (wrong,) = run_ranks(1, wrong_programs, stage, {}, accumulation, seeds, timeout_seconds=1800)
    assert not wrong


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("stage", [2, 3])
def test_so_they_do_with_gradients_on_the_host(stage: int, accumulation: int) -> None:
    fields = {"gradients_on_host": True, "update_interval": 1}
    (wrong,) = run_ranks(
        1, wrong_programs, stage, fields, accumulation, range(4), device="sim", timeout_seconds=280
    )
    assert not wrong


def two_engines(stage: int) -> float:
    config = zenflow_config(stage, torch.float32, lr=LR) | {"gradient_clipping": 0.0}
    config["optimizer"]["params"] |= {"weight_decay": DECAY}
    engines = [make_engine(config, model=LinearNet) for _ in range(2)]
    plains = [Plain(LR, DECAY) for _ in range(2)]
    for number in range(4):
        for first, second in (engines, plains):
            backward(
                first, drawn_loss(first, number) + drawn_loss(second, number + 10), number % 2 == 1
            )
            first.step()
            second.step()
    found = 0.0
    for engine, plain in zip(engines, plains, strict=True):
        for master, expected in zip(
            full_masters_of(engine), plain.module.parameters(), strict=True
        ):
            found = max(found, float((master.view(-1) - expected.detach().view(-1)).abs().max()))
        engine.destroy()
    return found


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_two_engines_in_one_loss(stage: int) -> None:
    (found,) = run_ranks(1, two_engines, stage)
    assert found < 3e-6


# -- what is really interrupted --------------------------------------------------------------------


def after_an_interruption(
    stage: int, place: int, plain: bool, kind: type[BaseException], folder: str
) -> list[str]:
    """What training on, stepping, and saving say after an exception inside autograd that the script
    has caught."""
    engine = make_engine(zenflow_config(stage, torch.float32), model=LinearNet)
    once(engine, 0, False)
    engine.step()
    Bomb.at, Bomb.error = place, kind
    with suppress(kind):
        once(engine, 1, plain)
    said = []
    attempts: list[Callable[[], Any]] = [
        lambda: once(engine, 2, plain),
        engine.step,
        lambda: engine.save_checkpoint(folder),
        lambda: engine.load_checkpoint(folder),
    ]
    for attempt in attempts:
        try:
            attempt()
            said.append("")
        except StateError as error:
            said.append(str(error))
    engine.destroy()
    return said


@pytest.mark.sampled(4)
@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_an_interrupted_pass_is_one_true_error_and_can_be_saved(
    stage: int, plain: bool, kind: type[BaseException], tmp_path: Any
) -> None:
    for place in (0, 2, 3):
        ((again, step, save, load),) = run_ranks(
            1, after_an_interruption, stage, place, plain, kind, str(tmp_path)
        )
        cause = "an exception" if plain else f"{kind.__name__} (bomb)"
        for said in (again, step, load):
            assert said.startswith(f"{cause} interrupted the last backward pass"), (place, said)
        assert save == ""


def nested_twice(stage: int) -> str:
    """What ``engine.backward`` says of a loss whose hook runs two passes that the engine counts as
    one."""
    engine = make_engine(zenflow_config(stage, torch.float32), model=LinearNet)
    loss = leaf(engine).sum() * 1.0

    def parts(gradient: torch.Tensor) -> None:
        with torch.enable_grad():
            for number in range(2):
                drawn_loss(engine, number).backward()

    loss.register_hook(parts)
    try:
        engine.backward(loss)
    except StateError as error:
        return str(error)
    finally:
        engine.destroy()
    return ""


@pytest.mark.parametrize("stage", [2, 3])
def test_passes_inside_the_engines_own_are_one_true_error(stage: int) -> None:
    """DeepSpeed's own is an assertion, without a text at stage 3. In ``loss.backward()`` they
    train."""
    (said,) = run_ranks(1, nested_twice, stage)
    assert "call loss.backward() in place of" in said


def steps_without_backward(stage: int, accumulation: int) -> list[str]:
    config = zenflow_config(stage, torch.float32, accumulation=accumulation)
    engine, said = make_engine(config, model=LinearNet), []
    for number in range(2):
        for micro_step in range(1, accumulation):
            once(engine, 10 * number + micro_step, False)
            engine.step()
        if stage == 3 and accumulation > 1:  # any pass completes the gradients
            engine.step()
            continue
        try:
            engine.step()
        except StateError as error:
            said.append(str(error))
        once(engine, number, False)
        engine.step()
    assert engine.global_steps == 2
    engine.destroy()
    return said


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_step_without_a_backward_pass_is_one_error_and_changes_nothing(
    stage: int, accumulation: int
) -> None:
    (said,) = run_ranks(1, steps_without_backward, stage, accumulation)
    assert len(said) == (0 if stage == 3 and accumulation == 2 else 2)
    assert all("no backward pass since the last step" in text for text in said)
