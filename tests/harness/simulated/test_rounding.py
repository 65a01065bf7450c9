"""The simulated accelerator rounds as a GPU where torch's kernels there are not the CPU's."""

from __future__ import annotations

from collections.abc import Callable

import torch

from tests.support.ranks import on_sim

OPERATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "by a number": lambda x: x / 3.0,
    "by a number, in place": lambda x: x.clone().div_(3.0),
    "by a number, into another": lambda x: torch.div(x, 3.0, out=torch.empty_like(x)),
    "by a tensor": lambda x: x / (x + 1.0),
    "expm1": torch.expm1,
    "log, in place": lambda x: x.clone().log_(),
    "sqrt": torch.sqrt,
    "sqrt, in place": lambda x: x.clone().sqrt_(),
    "sqrt, into another": lambda x: torch.sqrt(x, out=torch.empty_like(x)),
    "product": lambda x: x * 0.3 + x,
}


def results() -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(0)
    x = torch.rand(4096) + 0.1
    return {
        name: (operation(x), operation(x.to("sim")).cpu()) for name, operation in OPERATIONS.items()
    }


def test_some_operations_round_as_on_a_gpu() -> None:
    found = on_sim(results)[0]
    different = {name for name, (cpu, sim) in found.items() if not torch.equal(cpu, sim)}
    # MKL's square root, where torch has it, is not the nearest number
    assert {name for name in different if not name.startswith("sqrt")} == {
        "by a number",
        "by a number, in place",
        "by a number, into another",
        "expm1",
        "log, in place",
    }
    inverse = float(torch.tensor(1.0) / 3.0)
    torch.manual_seed(0)
    x = torch.rand(4096) + 0.1
    assert torch.equal(found["by a number"][1], x * inverse)
    for name in ("sqrt", "sqrt, in place", "sqrt, into another"):
        assert torch.equal(found[name][1], x.double().sqrt().float())
    for cpu, sim in found.values():
        torch.testing.assert_close(sim, cpu, rtol=2**-22, atol=0)
