"""Gradients that go to the host during backward: what a slot holds once they are finished."""

from contextlib import nullcontext

import pytest
import torch
from deepspeed.accelerator import get_accelerator

from deepspeed_ext.adapter.gradients import Extent, HostGradients
from tests.support.ranks import run_ranks
from tests.support.streams import delay

NUMEL = 1 << 14
DEVICES = ["cpu", pytest.param("accelerator", marks=pytest.mark.gpu)]


def finished(sums_in_fp32: bool, ends_early: bool) -> list[bool]:
    """Whether each slot is right after a late gradient, a sum of two, one that was never made, and
    one that is complete unless the step `ends_early`, before its last micro-step."""
    accelerator = get_accelerator()
    device = accelerator.current_device_name()
    dtype = torch.float32 if sums_in_fp32 else torch.bfloat16
    slots = [accelerator.pin_memory(torch.full((4 * NUMEL,), float("nan"), dtype=dtype))]
    places = {number: Extent(0, number * NUMEL, (number + 1) * NUMEL) for number in range(4)}
    gradients = HostGradients(places, lambda index, _: slots[index], torch.linalg.vector_norm)
    made = [torch.randn(NUMEL, device=device).bfloat16() for _ in range(4)]
    expected = [each.cpu().to(dtype) for each in made]
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
    total = expected[1] + expected[2]
    wanted = [expected[0], total, torch.zeros_like(total), expected[3]]
    return [
        torch.equal(part, each) for part, each in zip(slots[0].split(NUMEL), wanted, strict=True)
    ]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("ends_early", [False, True])
@pytest.mark.parametrize("sums_in_fp32", [False, True])
def test_every_slot_is_complete_once_gradients_are_finished(
    sums_in_fp32: bool, ends_early: bool, device: str
) -> None:
    assert run_ranks(1, finished, sums_in_fp32, ends_early, device=device) == [[True] * 4]


def shown_and_written() -> dict[str, tuple[float, float]]:
    """The norm of gradients after one was read, one written and one written with the same values;
    beside the norm that is due."""
    accelerator = get_accelerator()
    device = accelerator.current_device_name()
    slots = [torch.zeros(3 * NUMEL, dtype=torch.bfloat16)]
    places = {number: Extent(0, number * NUMEL, (number + 1) * NUMEL) for number in range(3)}
    gradients = HostGradients(places, lambda index, _: slots[index], torch.linalg.vector_norm)
    made = [torch.randn(NUMEL, device=device).bfloat16() for _ in range(3)]
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
def test_a_gradient_that_was_shown_has_the_norm_of_what_it_holds(device: str) -> None:
    (found,) = run_ranks(1, shown_and_written, device=device)
    for name, (norm, due) in found.items():
        assert norm == due, name


def read_at_once() -> bool:
    """Whether a sum that is shown in the middle of a step holds a gradient that arrives late, on
    another stream."""
    accelerator = get_accelerator()
    slots = [accelerator.pin_memory(torch.full((NUMEL,), float("nan"), dtype=torch.bfloat16))]
    gradients = HostGradients(
        {0: Extent(0, 0, NUMEL)}, lambda index, _: slots[index], torch.linalg.vector_norm
    )
    made = torch.randn(NUMEL, device=accelerator.current_device_name())
    expected = made.cpu().bfloat16()
    accelerator.synchronize()
    on_another = nullcontext()
    if not accelerator.is_synchronized_device():
        on_another = accelerator.stream(accelerator.Stream())
    with on_another:
        delay()
        gradients.take(0, made, adds=False, completes=False)
    return torch.equal(gradients.shown(0), expected)


@pytest.mark.parametrize("device", ["sim", *DEVICES[1:]])
def test_a_sum_is_shown_once_it_has_arrived(device: str) -> None:
    assert run_ranks(1, read_at_once, device=device) == [True]


def weights_from_the_slot() -> bool:
    """Whether weights that are still on their way up from a slot are right if its next gradient is
    zero."""
    accelerator = get_accelerator()
    slots = [accelerator.pin_memory(torch.ones(NUMEL, dtype=torch.bfloat16))]
    gradients = HostGradients(
        {0: Extent(0, 0, NUMEL)}, lambda index, _: slots[index], torch.linalg.vector_norm
    )
    weights = torch.zeros(NUMEL, dtype=torch.bfloat16, device=accelerator.current_device_name())
    accelerator.synchronize()
    delay()
    weights.copy_(slots[0], non_blocking=True)
    gradients.finish()
    return bool((weights.cpu() == 1.0).all()) and not slots[0].any()


@pytest.mark.parametrize("device", ["sim", *DEVICES[1:]])
def test_a_gradient_that_was_never_made_waits_for_weights_that_come_from_its_slot(
    device: str,
) -> None:
    assert run_ranks(1, weights_from_the_slot, device=device) == [True]
