"""The simulated process group: gloo's results, NCCL's order."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.ranks import RankError, run_ranks
from tests.support.same import assert_same


def collectives(device: str) -> dict[str, torch.Tensor]:
    """Every collective that DeepSpeed and this package use, on each rank's own numbers."""
    rank, size = dist.get_rank(), dist.get_world_size()
    if device == "sim":
        device = f"sim:{rank}"

    def numbers(count: int = 12, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return (torch.arange(count) * 1.37 + rank * 10.1).to(device, dtype)

    results: dict[str, Any] = {}
    for name, op in {
        "sum": dist.ReduceOp.SUM,
        "max": dist.ReduceOp.MAX,
        "min": dist.ReduceOp.MIN,
    }.items():
        dist.all_reduce(value := numbers(), op)
        results[f"all_reduce {name}"] = value
    dist.all_reduce(value := numbers(dtype=torch.bfloat16))
    results["all_reduce bf16"] = value
    dist.broadcast(value := numbers(), src=1)
    results["broadcast"] = value
    dist.reduce(value := numbers(), dst=1)
    results["reduce"] = value if rank == 1 else None
    dist.all_gather(pieces := [torch.empty(12, device=device) for _ in range(size)], numbers())
    results["all_gather"] = torch.cat(pieces)
    dist.all_gather_into_tensor(whole := torch.empty(12 * size, device=device), numbers())
    results["all_gather_into_tensor"] = whole
    whole = torch.zeros(12 * size, device=device)
    own = whole[12 * rank : 12 * (rank + 1)]
    own.copy_(numbers())
    dist.all_gather_into_tensor(whole, own)
    results["all_gather_into_tensor in place"] = whole
    dist.reduce_scatter_tensor(part := torch.empty(12 // size, device=device), numbers())
    results["reduce_scatter_tensor"] = part
    if device != "cpu":  # gloo of torch 2.6 takes no list here
        dist.reduce_scatter(
            part := torch.empty(12 // size, device=device), list(numbers().chunk(size))
        )
    results["reduce_scatter"] = part
    dist.all_to_all_single(swapped := torch.empty(12, device=device), numbers())
    results["all_to_all_single"] = swapped
    gathered = [torch.empty(12, device=device) for _ in range(size)] if rank == 0 else None
    dist.gather(numbers(), gathered, dst=0)
    results["gather"] = torch.cat(gathered) if gathered else None
    dist.scatter(
        part := torch.empty(12 // size, device=device),
        list(numbers().chunk(size)) if rank == 0 else None,
        src=0,
    )
    results["scatter"] = part
    for sender in (0, 1):  # there and back, as a pipeline does
        value = numbers() if rank == sender else torch.empty(12, device=device)
        dist.send(value, 1 - sender) if rank == sender else dist.recv(value, sender)
        results[f"sent by {sender}"] = value
    group = dist.new_group(list(range(size)))
    dist.all_reduce(value := numbers(), group=group)
    results["in another group"] = value
    objects: list[Any] = [None] * size
    dist.all_gather_object(objects, {"rank": rank})
    results["objects"] = objects
    dist.barrier()
    return {
        name: value.cpu() if isinstance(value, torch.Tensor) else value
        for name, value in results.items()
    }


def test_results_equal_gloos() -> None:
    assert_same(run_ranks(2, collectives, "cpu"), run_ranks(2, collectives, "sim", device="sim"))


def only_here() -> dict[str, Any]:
    """What NCCL has and gloo has not: averages and coalesced launches."""
    rank, size = dist.get_rank(), dist.get_world_size()
    value = torch.full((4,), float(rank + 1), device=f"sim:{rank}")
    dist.all_reduce(value, dist.ReduceOp.AVG)
    outputs = [torch.empty(2 * size, device=value.device) for _ in range(3)]
    with dist._coalescing_manager(device=value.device, async_ops=True) as manager:
        for number, output in enumerate(outputs):
            dist.all_gather_into_tensor(
                output, torch.full((2,), 10.0 * number + rank, device=value.device)
            )
    manager.wait()
    return {"average": value.tolist(), "coalesced": [output.tolist() for output in outputs]}


def test_averages_and_coalesced_launches() -> None:
    expected = {
        "average": [1.5] * 4,
        "coalesced": [[10.0 * number + rank for rank in (0, 0, 1, 1)] for number in range(3)],
    }
    assert run_ranks(2, only_here, device="sim") == [expected, expected]


def waiting_orders_the_current_stream(wait: bool) -> tuple[bool, list[float], int]:
    """Whether the collective was late, what came out, and the races of a reader on another
    stream."""
    from tests.support.simulated_accelerator import device as sim
    from tests.support.simulated_accelerator import simulation

    value = torch.ones(4, device=f"sim:{dist.get_rank()}")
    work = dist.all_reduce(value, async_op=True)
    late = not work.is_completed()
    other = sim.Stream()
    if wait:
        with sim.stream(other):
            work.wait()
    else:
        work.wait()  # orders the main stream only
    with sim.stream(other):
        doubled = value * 2
    sim.synchronize()  # a race is found when its operation runs
    found = len(simulation.found_races())
    dist.barrier()
    return late, doubled.tolist(), found


def test_waiting_orders_only_the_current_stream() -> None:
    for late, doubled, races in run_ranks(2, waiting_orders_the_current_stream, True, device="sim"):
        assert (late, doubled, races) == (True, [4.0] * 4, 0)
    for _, _, races in run_ranks(2, waiting_orders_the_current_stream, False, device="sim"):
        assert races > 0


def two_groups_in_two_orders(order: str, seed: int) -> float:
    """The host waits for two groups in another order on each rank, while the device holds both
    back."""
    from tests.support.simulated_accelerator import simulation

    rank = dist.get_rank()
    groups = [dist.new_group([0, 1]) for _ in range(2)]
    simulation.configure(order, seed + rank)  # type: ignore[arg-type]
    values = [torch.ones(4, device=f"sim:{rank}") for _ in groups]
    works = [
        dist.all_reduce(value, group=group, async_op=True)
        for value, group in zip(values, groups, strict=True)
    ]
    for index in (0, 1) if rank == 0 else (1, 0):
        works[index].wait()
        values[index].sum().item()
    simulation.configure("held")
    return sum(value.sum().item() for value in values)


@pytest.mark.parametrize("order", ["held", "seeded"])
def test_groups_that_are_waited_for_in_two_orders_do_not_hang(order: str) -> None:
    for seed in range(3):
        assert run_ranks(
            2, two_groups_in_two_orders, order, seed, device="sim", timeout_seconds=30
        ) == [16.0, 16.0]


def one_rank_waits_elsewhere() -> float:
    """Rank 1 needs a collective that rank 0 has launched, while rank 0's host waits for something
    else."""
    rank = dist.get_rank()
    host_group = dist.new_group([0, 1], backend="gloo")
    value = torch.ones(4, device=f"sim:{rank}")
    dist.all_reduce(value)
    if rank == 1:
        value.sum().item()
    dist.all_reduce(torch.ones(1), group=host_group)
    return value.sum().item()


def test_a_device_works_while_its_host_waits_elsewhere() -> None:
    assert run_ranks(2, one_rank_waits_elsewhere, device="sim", timeout_seconds=30) == [8.0, 8.0]


def freed_before_the_wait() -> None:
    """The output goes while the collective is in flight, and its memory is written again."""
    value = torch.ones(4, device=f"sim:{dist.get_rank()}")
    dist.all_reduce(value, async_op=True)
    del value
    torch.zeros(4, device=f"sim:{dist.get_rank()}")
    torch.accelerator.synchronize()


def test_a_collective_that_nobody_waits_for_is_a_race() -> None:
    with pytest.raises(RankError, match="no order between two tasks"):
        run_ranks(2, freed_before_the_wait, device="sim", pool="freed")
