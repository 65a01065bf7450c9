"""What an exception leaves half done is recorded, with the exception, and nothing else is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from deepspeed_ext.adapter.readiness import BackwardPass, Interruption, Work
from deepspeed_ext.errors import StateError


def interrupted(work: Work) -> Interruption:
    interruption = Interruption()
    with pytest.raises(KeyboardInterrupt), interruption.recorded(work):
        raise KeyboardInterrupt("now")
    return interruption


@pytest.mark.parametrize("work", Work)
def test_the_next_call_names_what_was_interrupted_and_by_what(work: Work) -> None:
    interruption = interrupted(work)
    with pytest.raises(
        StateError, match=r"^KeyboardInterrupt \(now\) interrupted the last"
    ) as raised:
        interruption.require_none()
    assert work.value in str(raised.value)
    interruption.require_none(work)


def test_nothing_is_recorded_of_work_that_ends_or_has_not_begun() -> None:
    interruption = Interruption()
    with interruption.recorded(Work.STEP):
        pass
    with pytest.raises(ValueError, match="early"), interruption.recorded(Work.LOAD, lambda: False):
        raise ValueError("early")
    interruption.require_none()


def test_work_is_whole_if_the_exception_comes_when_its_context_is_left() -> None:
    """A signal's exception between two lines of `with`; Python then closes the context's
    generator."""
    interruption = Interruption()
    generator = Interruption.recorded.__wrapped__(interruption, Work.STEP)  # type: ignore[attr-defined]
    next(generator)
    generator.close()
    interruption.require_none()


def test_a_whole_load_heals() -> None:
    interruption = interrupted(Work.LOAD)
    interruption.healed()
    interruption.require_none()


# -- backward passes, without DeepSpeed: a parameter whose hook announces that its gradient is reduc


class Engine:
    """Hooks as those of DeepSpeed, around `BackwardPass`."""

    def __init__(self) -> None:
        self.weight = torch.nn.Parameter(torch.ones(2))
        self.begun = self.reduced = self.completed = 0
        self.following = BackwardPass(self._begins, lambda: [self.weight])
        self.following.register_grad_acc_post_hook(self._complete)
        self.weight.register_post_accumulate_grad_hook(self._reduce)
        self.interruption = Interruption()

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

    def require_whole(self) -> None:
        self.following.notice(self.interruption)
        self.interruption.require_none()


class Raises(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        raise ValueError("inside")


def leaf() -> torch.Tensor:
    return torch.zeros(2, requires_grad=True)


def test_two_outputs_in_one_loss_are_one_pass_and_the_next_pass_ends_too() -> None:
    engine = Engine()
    (engine(leaf()) + engine(leaf())).sum().backward()
    assert (engine.begun, engine.completed, engine.following.backward_active_depth) == (1, 1, 0)
    engine(leaf()).sum().backward()
    assert (engine.begun, engine.completed) == (2, 2)
    engine.require_whole()


def test_each_of_two_passes_without_a_forward_between_them_ends() -> None:
    engine = Engine()
    first, second = engine(leaf()), engine(leaf())
    first.sum().backward()
    second.sum().backward()
    assert (engine.begun, engine.completed) == (2, 2)
    engine.require_whole()


def test_a_pass_inside_another_belongs_to_it() -> None:
    engine = Engine()
    y = engine(leaf())

    def inner(grad: torch.Tensor) -> None:
        with torch.enable_grad():
            engine(leaf()).sum().backward()
        engine.require_whole()
        assert engine.completed == 0

    y.register_hook(inner)
    y.sum().backward()
    assert (engine.begun, engine.reduced, engine.completed) == (1, 2, 1)
    engine.require_whole()


def test_an_exception_inside_autograd_is_noticed_afterwards() -> None:
    engine = Engine()
    with pytest.raises(ValueError, match="inside"):
        # The weight's gradient comes first, since `engine` runs after `Raises`.
        engine(Raises.apply(leaf())).sum().backward()
    assert engine.reduced == 1
    with pytest.raises(StateError, match=r"^an exception interrupted the last backward pass"):
        engine.require_whole()


def test_an_exception_before_any_gradient_changes_nothing() -> None:
    engine = Engine()
    y = engine(leaf())

    def raises(grad: torch.Tensor) -> None:
        raise ValueError("early")

    y.register_hook(raises)
    with pytest.raises(ValueError, match="early"):
        y.sum().backward()
    engine.require_whole()
    engine(leaf()).sum().backward()
    assert engine.completed == 1
    engine.require_whole()


@contextmanager
def failing_call(engine: Engine) -> Iterator[None]:
    with pytest.raises(ValueError), engine.following.recorded(engine.interruption):
        yield


def test_an_exception_that_leaves_our_call_is_named_if_a_gradient_was_reduced() -> None:
    engine = Engine()
    with failing_call(engine):
        raise ValueError("the loss is no scalar")
    engine.require_whole()
    with failing_call(engine):
        engine(Raises.apply(leaf())).sum().backward()
    with pytest.raises(
        StateError, match=r"^ValueError \(inside\) interrupted the last backward pass"
    ):
        engine.require_whole()


def test_a_gradient_that_autograd_has_left_counts() -> None:
    """An exception between autograd's sum and our hook."""
    engine = Engine()
    with failing_call(engine):
        engine.following.enter_backward()
        engine.weight.grad = torch.ones(2)
        raise ValueError("now")
    with pytest.raises(StateError, match=r"^ValueError \(now\)"):
        engine.require_whole()


def test_a_gradient_of_an_earlier_pass_does_not_count() -> None:
    """Stage 1 leaves gradients at the parameters until the last micro-step."""
    engine = Engine()
    engine.weight.grad = torch.ones(2)
    y = engine(leaf())

    def raises(grad: torch.Tensor) -> None:
        raise ValueError("early")

    y.register_hook(raises)
    with failing_call(engine):
        y.sum().backward()
    engine.require_whole()
