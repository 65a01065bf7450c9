"""What older releases of DeepSpeed lack is replaced by what they have."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from deepspeed_ext.adapter import contract, releases
from deepspeed_ext.runtime import backend

ACCELERATOR = "deepspeed.accelerator.abstract_accelerator:DeepSpeedAccelerator"


@pytest.mark.parametrize(
    ("release", "lacks", "has"),
    [
        ((0, 19, 5), "register_host_memory", ()),
        ((0, 19, 6), "pin_empty", ("register_host_memory",)),
        ((0, 19, 7), "pin_memory_alignment", ("register_host_memory", "pin_empty")),
        ((0, 19, 8), None, ("register_host_memory", "pin_empty", "pin_memory_alignment")),
    ],
)
def test_the_contract_of_a_release_has_what_came_with_it(
    monkeypatch: pytest.MonkeyPatch, release: tuple, lacks: str | None, has: tuple
) -> None:
    monkeypatch.setattr(contract, "release", lambda: release)
    members = contract.expected_members(ACCELERATOR)
    assert lacks not in members
    assert set(has) <= set(members)
    assert all(isinstance(each, (str, contract.Takes)) for each in members.values())


def test_a_boundary_is_a_method_or_an_attribute() -> None:
    for said in (True, False):
        old = SimpleNamespace(is_gradient_accumulation_boundary=said)
        new = SimpleNamespace(is_gradient_accumulation_boundary=lambda said=said: said)
        assert releases.is_at_boundary(old) is releases.is_at_boundary(new) is said


def test_an_engine_without_a_choice_manages_accumulation() -> None:
    assert releases.manages_accumulation(SimpleNamespace())
    for said in (True, False):
        engine = SimpleNamespace(managed_gradient_accumulation=lambda said=said: said)
        assert releases.manages_accumulation(engine) is said


def test_groups_without_padding_have_none() -> None:
    old = SimpleNamespace(round_robin_bit16_groups=[["a", "b"], ["c"]])
    new = SimpleNamespace(round_robin_bit16_padding=[[0, 3], [1]])
    assert releases.group_paddings(old) == [[0, 0], [0]]
    assert releases.group_paddings(new) == [[0, 3], [1]]


@pytest.mark.parametrize("release", [(0, 19, 0), (0, 19, 7), (0, 19, 8), (0, 19, 12)])
def test_norms_show_overflows_since_0_19_8(monkeypatch: pytest.MonkeyPatch, release: tuple) -> None:
    monkeypatch.setattr(releases, "release", lambda: release)
    assert releases.norm_shows_overflow() is (release >= (0, 19, 8))


class Runtime:
    """A device's runtime that locks pages, or refuses."""

    def __init__(self, error: int = 0) -> None:
        self.error = error
        self.locked: dict[int, int] = {}

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:  # noqa: N802
        self.locked[address] = nbytes
        return self.error

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        del self.locked[address]
        return self.error


def old_accelerator(monkeypatch: pytest.MonkeyPatch, runtime: Any) -> Any:
    """One that locks no pages itself."""
    module = SimpleNamespace() if runtime is None else SimpleNamespace(cudart=lambda: runtime)
    monkeypatch.setattr(torch, "get_device_module", lambda name: module)
    return SimpleNamespace(device_name=lambda: "some")


def test_the_runtime_locks_pages_if_deepspeed_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = Runtime()
    accelerator = old_accelerator(monkeypatch, runtime)
    assert backend.page_lock(accelerator, 4096, 10)
    assert runtime.locked == {4096: 10}
    backend.page_unlock(accelerator, 4096)
    assert runtime.locked == {}
    assert backend.page_lock_alignment(accelerator) == 1


def test_a_runtime_that_refuses_says_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator = old_accelerator(monkeypatch, Runtime(712))
    with pytest.raises(RuntimeError, match="error 712"):
        backend.page_lock(accelerator, 4096, 10)


def test_a_device_without_a_runtime_locks_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator = old_accelerator(monkeypatch, None)
    assert backend.page_lock(accelerator, 4096, 10) is False
    backend.page_unlock(accelerator, 4096)


def test_the_cpu_locks_no_memory_that_it_allocates() -> None:
    tensor = backend.pinned_empty(SimpleNamespace(device_name=lambda: "cpu"), 7, torch.bfloat16)
    assert (tensor.numel(), tensor.dtype, tensor.is_pinned()) == (7, torch.bfloat16, False)
