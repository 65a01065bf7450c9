"""Which calls an engine takes: none on half-done work, none inside an open step, and each mistake
is named."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.utils import safe_set_full_grad
from torch.utils.checkpoint import checkpoint

from deepspeed_ext.adapter.readiness import BackwardPass
from deepspeed_ext.errors import ConfigError, StateError
from tests.support.linear import LinearNet, drawn_loss
from tests.support.log import heard
from tests.support.models import batches, on_device
from tests.support.ranks import run_ranks
from tests.support.same import first_difference
from tests.support.zenflow import full_masters_of, make_engine, zenflow_config

# -- backward passes, without DeepSpeed ------------------------------------------------------------


class Engine:
    """Hooks as those of DeepSpeed, around `BackwardPass`."""

    def __init__(self) -> None:
        self.weight = torch.nn.Parameter(torch.ones(2))
        self.begun = self.reduced = self.completed = 0
        self.following = BackwardPass(self._begins)
        self.following.register_grad_acc_post_hook(self._complete)
        self.weight.register_post_accumulate_grad_hook(self._reduce)

    def _begins(self) -> None:
        self.begun += 1

    def _reduce(self, weight: torch.Tensor) -> None:
        self.following.reenter_backward_if_needed()
        self.reduced += 1
        weight.grad = None
        self.following.update_hook_state_and_maybe_run_epilogue(1)

    def _complete(self) -> None:
        self.completed += 1
        self.following.exit_backward()

    def _enter(self, grad: torch.Tensor) -> torch.Tensor:
        self.following.enter_backward()
        self.following.queue_post_backward_callback()
        return grad

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        self.following.reset_for_new_step()
        y = x * self.weight
        y.register_hook(self._enter)
        return y


def zeros() -> torch.Tensor:
    return torch.zeros(2, requires_grad=True)


def test_two_outputs_in_one_loss_are_one_pass_and_the_next_pass_ends_too() -> None:
    engine = Engine()
    (engine(zeros()) + engine(zeros())).sum().backward()
    assert (engine.begun, engine.completed, engine.following.backward_active_depth) == (1, 1, 0)
    engine(zeros()).sum().backward()
    assert (engine.begun, engine.completed, engine.following.passes) == (2, 2, 2)


def test_each_of_two_passes_without_a_forward_between_them_ends() -> None:
    engine = Engine()
    first, second = engine(zeros()), engine(zeros())
    first.sum().backward()
    second.sum().backward()
    assert (engine.begun, engine.completed) == (2, 2)


def test_a_pass_inside_another_belongs_to_it() -> None:
    engine = Engine()
    y = engine(zeros())

    def inner(grad: torch.Tensor) -> None:
        with torch.enable_grad():
            engine(zeros()).sum().backward()
        assert not engine.following.ended_early()
        assert engine.completed == 0

    y.register_hook(inner)
    y.sum().backward()
    assert (engine.begun, engine.reduced, engine.completed) == (1, 2, 1)


# -- engines ---------------------------------------------------------------------------------------


def said(call: Callable[[], Any]) -> str:
    """What a call that is refused says; empty if it is taken."""
    try:
        call()
    except (StateError, ConfigError, ValueError) as error:
        return str(error)
    return ""


@contextmanager
def signalled_in(owner: Any, name: str, handler: Callable[[], None]) -> Iterator[None]:
    """A signal arrives before the next call of a method."""
    before = signal.signal(signal.SIGUSR1, lambda number, frame: handler())
    method, left = getattr(owner, name), [1]

    def signalled(*args: Any, **kwargs: Any) -> Any:
        if left:
            left.pop()
            signal.raise_signal(signal.SIGUSR1)
        return method(*args, **kwargs)

    setattr(owner, name, signalled)
    yield
    delattr(owner, name)
    signal.signal(signal.SIGUSR1, before)


def call_inside_a_step(config: dict[str, Any], folder: str) -> list[str]:
    """What each call says inside a step; then the difference from a run without them."""
    outcomes: list[str] = []
    engines = [make_engine(config, model=LinearNet) for _ in range(2)]
    for seed in range(4):
        for engine in engines:
            engine.backward(drawn_loss(engine, seed))
            if engine is engines[1] or seed != 2:
                engine.step()
                continue

            def calls(engine: Any = engine) -> None:
                for call in (
                    lambda: engine.save_checkpoint(folder),
                    lambda: engine.load_checkpoint(folder),
                    lambda: engine.save_16bit_model(folder),
                    engine.offload_states,
                    engine.step,
                ):
                    outcomes.append(said(call))

            with signalled_in(engine.optimizer, "unscale_and_clip_grads", calls):
                engine.step()
    engines[0].save_checkpoint(folder)
    ours, plain = map(full_masters_of, engines)
    outcomes.append(first_difference(ours, plain, "masters"))
    for engine in engines:
        engine.destroy()
    return outcomes


@pytest.mark.parametrize("stage", [2, 3])
def test_calls_inside_a_step_are_refused_and_the_step_goes_on(stage: int, tmp_path: Path) -> None:
    (outcomes,) = run_ranks(1, call_inside_a_step, zenflow_config(stage), str(tmp_path))
    assert len(outcomes) == 6
    assert all("an optimizer step of this engine is running" in each for each in outcomes[:-1])
    assert outcomes[-1] == ""


class Twice(LinearNet):
    """Runs in a reentrant checkpoint, twice."""

    def forward(self, x: torch.Tensor, seed: int) -> torch.Tensor:
        first = checkpoint(super().forward, x, seed, use_reentrant=True)
        return first + checkpoint(super().forward, x, seed + 1, use_reentrant=True)


def reduce_twice(config: dict[str, Any]) -> str:
    engine = make_engine(config, model=Twice)
    told = said(lambda: engine.backward(drawn_loss(engine, 0)))
    engine.destroy()
    return told


@pytest.mark.parametrize("stage", [2, 3])
def test_a_second_gradient_from_a_reentrant_checkpoint_names_the_remedy(stage: int) -> None:
    (told,) = run_ranks(1, reduce_twice, zenflow_config(stage))
    assert "If the pass is that of a checkpoint, use use_reentrant=False" in told


def misuse(config: dict[str, Any]) -> dict[str, str]:
    """What is said of each mistake."""
    engine = make_engine(config, model=LinearNet)
    engine.backward(drawn_loss(engine, 0))
    engine.step()
    param = engine.module.layers[0].bias
    value = torch.zeros(getattr(param, "ds_shape", param.shape), device=engine.device)
    found = {"gradient": said(lambda: safe_set_full_grad(param, value))}
    found["step"] = said(engine.step)
    found["compile"] = said(lambda: engine.compile(compiled_autograd_enabled=True))
    engine.backward(drawn_loss(engine, 1))
    inner = engine.optimizer.optimizer
    inner.param_groups.append({**inner.param_groups[0], "params": [torch.nn.Parameter(value)]})
    found["group"] = said(engine.step)
    del inner.param_groups[1]
    found["afterwards"] = said(engine.step)
    engine.destroy()
    return found


@pytest.mark.parametrize("stage", [2, 3])
def test_mistakes_are_named_and_the_engine_goes_on(stage: int) -> None:
    (found,) = run_ranks(1, misuse, zenflow_config(stage))
    assert "Gradients are only available immediately after backward" in found["gradient"]
    assert "no backward pass since the last step" in found["step"]
    assert "compiled_autograd_enabled=True" in found["compile"]
    assert "optimizer.param_groups[1]['params'] holds a tensor that is not" in found["group"]
    assert "remove the group if it was added after initialize" in found["group"]
    assert found["afterwards"] == ""


# -- gradients before the step ---------------------------------------------------------------------


def sleep_before_steps(config: dict[str, Any]) -> str:
    masters = []
    for sleeps in (False, True):
        engine = make_engine(config)
        for batch in batches(6, 0):
            engine.backward(engine(on_device(batch)))
            if sleeps:
                engine.offload_states()
                engine.reload_states()
            engine.step()
        masters.append(full_masters_of(engine))
        engine.destroy()
    return first_difference(masters[0], masters[1], "masters")


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_states_may_be_offloaded_between_the_last_backward_pass_and_the_step(
    stage: int, accumulation: int
) -> None:
    assert (
        run_ranks(1, sleep_before_steps, zenflow_config(stage, accumulation=accumulation))[0] == ""
    )


def discard(config: dict[str, Any]) -> str:
    """Discards the first micro-step's gradients; the difference from a run that did not have
    them."""
    masters = []
    for discards in (True, False):
        engine = make_engine(config, model=LinearNet)
        for seed in range(3):
            if discards:
                engine.set_gradient_accumulation_boundary(False)
                engine.backward(drawn_loss(engine, 10 + seed))
                engine.optimizer.zero_grad()
            engine.set_gradient_accumulation_boundary(True)
            engine.backward(drawn_loss(engine, seed))
            engine.step()
        masters.append(full_masters_of(engine))
        engine.destroy()
    return first_difference(masters[0], masters[1], "masters")


@pytest.mark.parametrize("on_host", [False, True])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_zero_grad_discards_the_gradients_of_earlier_micro_steps(stage: int, on_host: bool) -> None:
    """As in sharpness-aware minimization by hand."""
    if on_host and stage == 1:
        pytest.skip("gradients of stage 1 are on the accelerator")
    config = zenflow_config(stage, accumulation=2, gradients_on_host=on_host)
    assert run_ranks(1, discard, config)[0] == ""


def grow(config: dict[str, Any], place: int) -> list[str]:
    """Warnings of steps: with what was trained from the start, then with a parameter unfrozen."""
    frozen: list[Any] = []

    def model() -> torch.nn.Module:
        net = LinearNet()
        net.layers[place].bias.requires_grad_(False)
        frozen.append(net.layers[place].bias)
        return net

    engine = make_engine(config, model=model)
    told = []
    for unfreezes in (False, True):
        frozen[0].requires_grad_(unfreezes)
        with heard("of the model") as lines:
            for seed in range(2):
                engine.backward(drawn_loss(engine, seed))
                engine.step()
        told.append("; ".join(message for _, message in lines))
    engine.destroy()
    return told


@pytest.mark.parametrize("stage", [2, 3])
def test_a_parameter_with_a_gradient_that_is_not_trained_is_named_once(stage: int) -> None:
    ((before, after),) = run_ranks(1, grow, zenflow_config(stage), stage)  # warned once per text
    assert before == ""
    assert after.count(f"layers.{stage}.bias, got a gradient but will not change") == 1
