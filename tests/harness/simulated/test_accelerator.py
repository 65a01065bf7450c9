"""The simulated accelerator is late, refuses what a device refuses, and finds what has no order."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.ranks import on_sim, run_ranks
from tests.support.same import assert_same

SEEDS = range(5)


# ---- operators


def operators(device: str) -> dict[str, Any]:
    """Results of operators with outputs of all kinds: new, in place, given, several, of a shape
    that values decide."""
    make = torch.Generator().manual_seed(1)
    a, b = (torch.randn(6, 5, generator=make).to(device) for _ in range(2))
    rows = torch.tensor([4, 0, 0, 5]).to(device)
    results = {
        "sum of kinds": a.bfloat16() + b * 2 - 1,
        "mm": a @ b.T,
        "softmax": a.softmax(-1),
        "layer norm": nn.functional.layer_norm(a, (5,), b[0], b[1]),
        "layer norm, mixed": torch.native_layer_norm(a.bfloat16(), (5,), b[0], b[1], 1e-5)[1],
        "embedding": nn.functional.embedding(rows, a),
        "cat": torch.cat([a, b.T.reshape(6, 5)], 1),
        "index": a[rows],
        "mask": a[a > 0],
        "nonzero": (a > 1).nonzero(),
        "where": torch.where(a > b, a, b),
        "top": a.topk(2).indices,
        "sorted": a.sort(dim=0, descending=True)[0],
        "added": torch.zeros(6, 5, device=device).index_add_(0, rows, a[:4]),
        "put": a.clone().index_put_((rows[:1], rows[1:2]), b[0, 0]),
        "filled": torch.empty(3, device=device).fill_(2),
        "out": torch.add(a, b, out=torch.empty(0, device=device)),
        "norms": torch.stack(torch._foreach_norm([a, b])),
        "std": torch.std_mean(a, 0)[0],
        "view": a.t().contiguous().view(3, 10).unfold(1, 2, 2),
        "complex": torch.fft.fft(a).abs(),
        "cross entropy": nn.functional.cross_entropy(a[:4], rows.clamp(max=4)),
        "equal": torch.equal(a, a.clone()),
        "item": a.sum().item(),
    }
    return {
        name: value.cpu() if isinstance(value, torch.Tensor) else value
        for name, value in results.items()
    }


def interrupted(kind: type[BaseException]) -> str:
    """What reaches the caller if `kind` is raised in the part of an operator that computes its
    shape, in Python."""
    name = f"simtest_{kind.__name__}"
    library = torch.library.Library(name, "FRAGMENT")
    library.define("copy_of(Tensor x) -> Tensor")

    def shape(x: torch.Tensor) -> torch.Tensor:
        raise kind

    library.impl("copy_of", shape, "Meta")
    library.impl("copy_of", torch.clone, "CPU")
    try:
        getattr(torch.ops, name).copy_of(torch.ones(2, device="sim")).cpu()
    except BaseException as error:
        return type(error).__name__
    return "nothing"


def test_an_interrupt_while_a_shape_is_computed_is_not_lost() -> None:
    assert on_sim(interrupted, ValueError) == ["nothing"], "the CPU's kernel knows better"
    assert on_sim(interrupted, KeyboardInterrupt) == ["KeyboardInterrupt"]


def test_operators_equal_the_cpus_to_the_bit() -> None:
    (found,) = on_sim(operators, "sim")
    (expected,) = run_ranks(1, operators, "cpu")
    assert_same(expected, found, "operator")


def steps(device: str, order: str = "", seed: int = 0, foreach: bool = False) -> list[torch.Tensor]:
    """Losses and parameters of a small network, whose optimizer divides by no number: that rounds
    differently."""
    if order:
        from tests.support.simulated_accelerator import simulation

        simulation.configure(order, seed)  # type: ignore[arg-type]
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Embedding(20, 16), nn.LayerNorm(16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 20)
    ).to(device)
    optimizer = torch.optim.SGD(
        model.parameters(), 0.1, momentum=0.9, weight_decay=0.01, foreach=foreach
    )
    losses = []
    for step in range(4):
        ids = torch.randint(0, 20, (4, 8), generator=torch.Generator().manual_seed(step)).to(device)
        loss = nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=foreach)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    if order:
        simulation.configure("held")
        assert not simulation.found_races()
    return [tensor.detach().cpu() for tensor in [*losses, *model.parameters()]]


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("order", ["eager", "held", "seeded"])
def test_training_equals_the_cpus_to_the_bit(order: str, foreach: bool) -> None:
    (found,) = on_sim(steps, "sim", order, 3, foreach)
    (expected,) = run_ranks(1, steps, "cpu", foreach=foreach)
    assert_same(expected, found)


def mistakes() -> list[str]:
    texts = []

    def attempt(function: Callable[[], Any]) -> None:
        try:
            function()
        except RuntimeError as error:
            texts.append(str(error))

    a = torch.ones(3, device="sim")
    attempt(lambda: a + torch.ones(3))
    attempt(lambda: a + torch.ones(2, device="sim"))
    attempt(lambda: torch.empty(3, device="sim", pin_memory=True))
    # found by the kernel, later
    nn.functional.embedding(torch.tensor([7]).to("sim"), torch.ones(3, 3, device="sim"))
    attempt(torch.accelerator.synchronize)
    attempt(torch.accelerator.synchronize)
    return texts


def test_mistakes_are_errors_and_a_kernels_error_names_its_launch() -> None:
    (texts,) = on_sim(mistakes)
    assert len(texts) == 4
    assert "same device" in texts[0]
    assert "size of tensor" in texts[1]
    assert "pinned" in texts[2]
    assert "index_select" in texts[3]
    assert "simulated/test_accelerator.py" in texts[3]
    assert "mistakes" in texts[3]


# ---- lateness


def copies() -> dict[str, Any]:
    from tests.support.simulated_accelerator import device as sim

    found: dict[str, Any] = {}
    ones = torch.ones(1000, device="sim")
    locked = torch.zeros(1000, pin_memory=True)
    for name, wait in {
        "stream": lambda: sim.current_stream().synchronize(),
        "event": lambda: sim.current_stream().record_event().synchronize(),
        "device": sim.synchronize,
        "query": lambda: any(sim.current_stream().query() for _ in range(1000)),
        "item": ones[0].item,
    }.items():
        locked.zero_()
        locked.copy_(ones, non_blocking=True)
        early = locked.sum().item()
        wait()
        found[f"down, until {name}"] = (early != 1000, locked.sum().item())
    pageable = torch.zeros(1000).copy_(ones, non_blocking=True)
    found["down, pageable"] = pageable.sum().item()
    source = torch.ones(10, pin_memory=True)
    late = source.to("sim", non_blocking=True)
    source.fill_(5)
    found["up, locked, changed before it was read"] = late.sum().item()
    source = torch.ones(10)
    late = source.to("sim", non_blocking=True)
    source.fill_(5)
    found["up, pageable"] = late.sum().item()
    sim.synchronize()
    before = sim.memory_allocated()
    sim.reset_peak_memory_stats()
    kept = torch.ones(10_000, pin_memory=True).to("sim", torch.bfloat16, non_blocking=True)
    found["asynchronous conversion needs the source on the device"] = (
        sim.max_memory_allocated() - before >= 60_000
    )
    sim.reset_peak_memory_stats()
    before = sim.memory_allocated()
    kept = torch.ones(10_000, pin_memory=True).to("sim", torch.bfloat16)
    found["blocking conversion does not"] = sim.max_memory_allocated() - before < 30_000
    found["value"] = kept.float().sum().item()
    return found


def test_copies_follow_the_rules_of_a_device() -> None:
    (found,) = on_sim(copies)
    for name in ("stream", "event", "device", "query", "item"):
        assert found.pop(f"down, until {name}") == (True, 1000)
    assert found == {
        "down, pageable": 1000,
        "up, locked, changed before it was read": 50,
        "up, pageable": 10,
        "asynchronous conversion needs the source on the device": True,
        "blocking conversion does not": True,
        "value": 10_000,
    }


def side_stream(
    wait: bool, order: str = "held", seed: int = 0, decisions: Any = ()
) -> tuple[float, int, Any, Any]:
    """A side stream adds to what the main stream then reads: the value, races, their text,
    decisions."""
    from tests.support.simulated_accelerator import device as sim
    from tests.support.simulated_accelerator import simulation

    values = torch.zeros(1000, device="sim")
    side = sim.Stream()
    sim.synchronize()
    simulation.configure(order, seed, decisions)  # type: ignore[arg-type]
    with sim.stream(side):
        for _ in range(3):
            values.add_(1)
    if wait:
        sim.current_stream().wait_stream(side)
    total = values.sum().cpu().item()
    made = simulation.decisions()
    simulation.configure("held")
    races = simulation.found_races()
    return total, len(races), (races[0].text, races[0].trace) if races else None, made


def test_a_planted_race_is_found_explained_and_replayed() -> None:
    totals, orders = set(), {}
    for seed in SEEDS:
        ((total, races, race, made),) = on_sim(side_stream, False, "seeded", seed)
        assert races > 0  # found whatever the order
        totals.add(total)
        orders[seed] = (total, made)
        for text in (
            "aten::add",
            "aten::sum",
            "side_stream",
            "writes bytes 0 to 4000",
            "reads bytes 0 to 4000",
            "stream 0",
        ):
            assert text in race[0]
        assert len(race[1]) >= 2
    assert len(totals) > 1  # and wrong in most orders
    for seed, (total, made) in orders.items():
        # a seed always gives its order
        assert on_sim(side_stream, False, "seeded", seed)[0][::3] == (total, made)
        assert on_sim(side_stream, False, "replay", 0, made)[0][0] == total
    assert len({str(made) for _, made in orders.values()}) > 1
    for seed in SEEDS:
        assert on_sim(side_stream, True, "seeded", seed)[0][:2] == (3000, 0)
    # other tests here take the CPU for the device
    assert "tests.support.simulated_accelerator.device" not in sys.modules


def orders_without_race() -> int:
    """What needs no wait, or has one."""
    from tests.support.simulated_accelerator import device as sim
    from tests.support.simulated_accelerator import simulation

    simulation.found_races()
    main, side = sim.current_stream(), sim.Stream()
    values = torch.zeros(1000, device="sim")
    side.wait_stream(main)
    with sim.stream(side):
        values[:500].add_(1)  # other bytes
    values[500:].add_(1)
    event = side.record_event()
    main.wait_event(event)
    values.add_(1)
    side.wait_stream(main)
    with sim.stream(side):
        values.sum()  # both read
    values.mean()
    side.synchronize()
    values.zero_()  # the host has waited
    third = sim.Stream()
    third.wait_stream(main)
    side.wait_stream(third)  # by way of another
    with sim.stream(side):
        values.add_(1)
    sim.synchronize()
    return len(simulation.found_races())


def test_what_has_an_order_is_no_race() -> None:
    assert on_sim(orders_without_race) == [0]


def reused(record: bool) -> tuple[float, int]:
    """A block that a side stream reads is freed and allocated again."""
    from tests.support.simulated_accelerator import device as sim
    from tests.support.simulated_accelerator import simulation

    simulation.found_races()
    side = sim.Stream()
    source = torch.ones(1000, device="sim")
    target = torch.empty(1000, pin_memory=True)
    side.wait_stream(sim.current_stream())
    with sim.stream(side):
        target.copy_(source, non_blocking=True)
        if record:
            source.record_stream(side)
    del source
    torch.full((1000,), 7.0, device="sim")
    sim.current_stream().synchronize()
    sim.synchronize()
    return target.sum().item(), len(simulation.found_races())


def test_memory_that_another_stream_uses_must_be_recorded() -> None:
    assert on_sim(reused, True) == [(1000, 0)]
    assert on_sim(reused, False) == [(7000, 1)]
