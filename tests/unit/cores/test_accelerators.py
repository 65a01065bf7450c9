"""Where the accelerators are: asked only of those that DeepSpeed trains on, and never at the cost
of a run."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from deepspeed_ext.cores import accelerators


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A host with two GPUs, of which the second is the current one, and DeepSpeed's accelerator."""
    properties = [
        SimpleNamespace(pci_domain_id=0, pci_bus_id=0x3B + index, pci_device_id=0)
        for index in range(2)
    ]
    module = SimpleNamespace(get_device_properties=properties.__getitem__)
    interface = SimpleNamespace(
        is_available=lambda: True,
        current_accelerator=lambda: torch.device("meta"),
        current_device_index=lambda: 1,
        device_count=lambda: 2,
    )
    host = SimpleNamespace(name="meta", module=module)
    monkeypatch.setattr(torch, "accelerator", interface, raising=False)
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    monkeypatch.setattr(
        accelerators, "get_accelerator", lambda: SimpleNamespace(device_name=lambda: host.name)
    )
    return host


def test_devices_have_addresses(gpus: SimpleNamespace) -> None:
    assert accelerators.count() == 2
    assert [accelerators.pci_address(index) for index in (None, 0)] == [
        "0000:3c:00.0",
        "0000:3b:00.0",
    ]
    gpus.module.get_device_properties = lambda index: SimpleNamespace(pci_bus_id=None)
    assert accelerators.pci_address() is None


def test_training_on_the_cpu_asks_no_gpu(gpus: SimpleNamespace) -> None:
    gpus.name = "cpu"
    gpus.module.get_device_properties = lambda index: pytest.fail("it initialized the device")
    assert accelerators.count() == 0
    assert accelerators.pci_address() is None


def test_a_look_up_that_fails_is_a_warning(
    gpus: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[str] = []
    monkeypatch.setattr(accelerators, "warn_once", heard.append)

    def fail(index: int) -> None:
        raise RuntimeError("no driver")

    gpus.module.get_device_properties = fail
    assert accelerators.pci_address() is None
    (warning,) = heard
    assert "RuntimeError: no driver" in warning


def test_a_torch_without_the_interface_or_without_a_device_has_no_accelerators(
    gpus: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert accelerators.count() == 2
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    assert accelerators.count() == 0
    monkeypatch.delattr(torch, "accelerator")
    assert accelerators.count() == 0
