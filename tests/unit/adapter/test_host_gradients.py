"""Gradients that go to the host during backward: what a slot holds once they are finished."""

import pytest
import torch
from deepspeed.accelerator import get_accelerator

from deepspeed_ext.adapter.host_gradients import HostGradients, Place
from tests.support.poison import delay
from tests.support.ranks import run_ranks

NUMEL = 1 << 14
DEVICES = ["cpu", pytest.param("accelerator", marks=pytest.mark.gpu)]


def finished(sums_apart: bool, ends_early: bool) -> list[bool]:
    """Whether each slot is right after a late gradient, a sum of two, one that was never made, and one that is complete
    unless the step `ends_early`, before its last micro-step."""
    accelerator = get_accelerator()
    device = accelerator.current_device_name()
    slots = [accelerator.pin_memory(torch.full((4 * NUMEL,), float("nan"), dtype=torch.bfloat16))]
    sums = accelerator.pin_memory(torch.full((4 * NUMEL,), float("nan"))) if sums_apart else None
    places = {number: Place(0, number * NUMEL, (number + 1) * NUMEL, number * NUMEL) for number in range(4)}
    gradients = HostGradients(places, slots.__getitem__, sums, torch.linalg.vector_norm)
    made = [torch.randn(NUMEL, device=device).bfloat16() for _ in range(4)]
    expected = [each.cpu() for each in made]
    late = [torch.full_like(each, float("nan")) for each in made]
    accelerator.synchronize()
    delay()
    for source, target in zip(made, late, strict=True):
        target.copy_(source)
    gradients.take(0, late[0], adds=False, completes=True)
    gradients.take(1, late[1], adds=False, completes=False)
    gradients.take(1, late[2], adds=True, completes=True)
    gradients.take(3, late[3], adds=False, completes=not ends_early)
    gradients.finish()
    total = (expected[1].float() + expected[2].float()).bfloat16() if sums_apart else expected[1] + expected[2]
    wanted = [expected[0], total, torch.zeros_like(total), expected[3]]
    return [torch.equal(part, each) for part, each in zip(slots[0].split(NUMEL), wanted, strict=True)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("ends_early", [False, True])
@pytest.mark.parametrize("sums_apart", [False, True])
def test_every_slot_is_complete_once_gradients_are_finished(sums_apart: bool, ends_early: bool, device: str) -> None:
    assert run_ranks(1, finished, sums_apart, ends_early, device=device) == [[True] * 4]


def shown_and_written(sums_apart: bool) -> dict[str, tuple[float, float]]:
    """The norm of gradients after one was read, one written and one written with the same values; beside the norm that
    is due."""
    accelerator = get_accelerator()
    device = accelerator.current_device_name()
    slots, sums = [torch.zeros(3 * NUMEL, dtype=torch.bfloat16)], torch.zeros(3 * NUMEL) if sums_apart else None
    places = {number: Place(0, number * NUMEL, (number + 1) * NUMEL, number * NUMEL) for number in range(3)}
    gradients = HostGradients(places, slots.__getitem__, sums, torch.linalg.vector_norm)
    made = [torch.randn(NUMEL, device=device) for _ in range(3)]
    made = made if sums_apart else [each.bfloat16() for each in made]
    for number, each in enumerate(made):
        gradients.take(number, each, adds=False, completes=True)
    gradients.shown(0)
    gradients.shown(1).fill_(2.0)
    place = gradients.shown(2)
    place.copy_(place.clone())
    gradients.finish()
    due = [made[0], torch.full((NUMEL,), 2.0, dtype=torch.bfloat16, device=device), made[2]]
    names = ("read", "written", "written as it was")
    return {
        name: (float(gradients.norms[number]), float(torch.linalg.vector_norm(due[number])))
        for number, name in enumerate(names)
    }


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("sums_apart", [False, True])
def test_a_gradient_that_was_shown_has_the_norm_of_what_it_holds(sums_apart: bool, device: str) -> None:
    (found,) = run_ranks(1, shown_and_written, sums_apart, device=device)
    for name, (norm, due) in found.items():
        assert norm == due, name
