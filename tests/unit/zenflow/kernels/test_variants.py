"""How many variants of a kernel a training compiles, as Triton itself decides it. The GPU is made
up: what would be compiled and launched is only counted."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import create_function_from_signature

from deepspeed_ext.config import ZenFlowConfig
from deepspeed_ext.zenflow.kernels import device, launch
from deepspeed_ext.zenflow.optimizers.adam import AdamKind
from deepspeed_ext.zenflow.plan.facts import Caller
from deepspeed_ext.zenflow.worker.kernel.adam_pass import AdamStep

BACKENDS = {
    "sm_90": make_backend(GPUTarget("cuda", 90, 32)),
    "gfx942": make_backend(GPUTarget("hip", "gfx942", 64)),
}


class Recorded:
    """Stands in for the module of kernels: launches nothing, and keeps what Triton would compile
    for."""

    def __init__(self) -> None:
        self.keys: dict[str, set[str]] = {target: set() for target in BACKENDS}
        self.launches = 0

    def __getattr__(self, kernel: str) -> Any:
        function = getattr(device, kernel)
        binders = {
            target: create_function_from_signature(function.signature, function.params, backend)
            for target, backend in BACKENDS.items()
        }

        def run(*args: Any, **options: Any) -> None:
            self.launches += 1
            for target, bind in binders.items():
                _, specialization, rest = bind(*args, **options)
                self.keys[target].add(f"{kernel} {specialization} {rest}")

        return _Grid(run)


class _Grid:
    def __init__(self, run: Any) -> None:
        self._run = run

    def __getitem__(self, grid: tuple[int]) -> Any:
        assert all(0 < size < 1 << 31 for size in grid)
        return self._run


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Recorded:
    """The CPU as a device with kernels."""
    module = Recorded()
    accelerator = SimpleNamespace(device=lambda index: nullcontext())
    monkeypatch.setattr(launch, "_found", lambda device_type: module)
    monkeypatch.setattr(launch, "missing", lambda device: None)
    monkeypatch.setattr(launch, "_variants", set())
    monkeypatch.setattr(launch, "get_accelerator", lambda: accelerator)
    return module


def flat(numel: int, first: int) -> torch.Tensor:
    return torch.zeros(numel + first, dtype=torch.bfloat16)[first:]


def test_50_steps_of_five_odd_partitions_compile_nothing_that_was_not_prepared(
    recorded: Recorded,
) -> None:
    """Lengths, offsets and numbers are all different, 1 and multiples of 16 among them: one variant
    for each kernel's dtypes and alignment, and the engine's start has made them all."""
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=1e-3)
    for dtype in ("float32", "int8"):
        kind: Any = AdamKind(optimizer, ZenFlowConfig(state_dtype=dtype))
        plan: Any = SimpleNamespace(
            rule=SimpleNamespace(block_size=32, estimates=True),
            caller=Caller("bfloat16", "bfloat16"),
            gradient_dtype="bfloat16",
            head_bytes=1,
            computes_there=True,
        )
        kind.prepare_kernels(plan, [flat(64, 0), flat(64, 1)], warns=True)
    expected = {target: set(keys) for target, keys in recorded.keys.items()}
    assert [len(keys) for keys in expected.values()] == [6, 6], (
        "predict and both steps of a share, twice"
    )
    assert len(launch.variants()) == 6

    before = recorded.launches
    sizes = [(1, 0), (16, 1), (5003, 3), (4096, 8), (70_001, 64)]
    arrays = [[flat(numel, first + offset) for offset in (0, 0, 8, 16)] for numel, first in sizes]
    inverses = [torch.ones(-(-numel // 32)) for numel, _ in sizes]
    state = torch.ones(3, 5, 32)
    coded = [torch.zeros(5, 32, dtype=each) for each in (torch.int8, torch.uint8)]
    coded += [torch.zeros(5, dtype=torch.uint8) for _ in range(2)]
    for step in range(1, 51):
        scale = 1.0 if step % 3 else 0.7
        for (weights, published, _, grad), inverse in zip(arrays, inverses, strict=True):
            effect = 1.0 if step == 2 else 1e-3
            launch.predict(weights, published, grad, inverse, scale, effect, 32)
        constants = AdamStep(1e-3 / step, 0.9, 0.95, 1e-8, 0.1, True, step, scale)
        for first in (0, 5):
            grad, weights = (flat(160, first).view(5, 32) for _ in range(2))
            launch.adam_step(list(state), grad, weights, constants)
            launch.adam_step([state[0], *coded], grad, weights, constants)
    assert recorded.launches - before == 50 * (5 + 2 + 2)
    assert recorded.keys == expected
    assert len(launch.variants()) == 6


def test_a_kernel_that_does_not_compile_at_the_start_leaves_torch_operations(
    recorded: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise RuntimeError("no assembler\nat all")

    told: list[str] = []
    monkeypatch.setattr(launch, "warn_once", told.append)
    monkeypatch.setattr(launch, "_given_up", {})
    monkeypatch.setattr(launch, "missing", lambda device: launch._given_up.get("meta"))
    launch.prepare(torch.device("meta"), 32, [fail], warns=True)
    assert len(told) == 1
    assert "A kernel failed at the start (RuntimeError: no assembler)" in told[0]

    def exhaust() -> None:
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(launch, "missing", lambda device: None)
    with pytest.raises(torch.OutOfMemoryError):
        launch.prepare(torch.device("meta"), 32, [exhaust], warns=True)
