"""A sample of blocks: which it draws, and what it copies of them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from deepspeed_ext.zenflow.optimizers.lion import LionKind
from deepspeed_ext.zenflow.rules.guard import Sample, drawn
from deepspeed_ext.zenflow.worker.kernel.lion_pass import LionStep
from deepspeed_ext.zenflow.worker.kernel.moments import decode

BLOCK = 4


def sample_of(
    numel: int, most_blocks: int, seed: int = 1, index: int = 0
) -> tuple[Sample, torch.Tensor]:
    state = tuple(torch.arange(numel, dtype=torch.float32) + 1000 * number for number in range(3))
    partition: Any = SimpleNamespace(
        master=state[0], moments=state[1:], scales=(), state=state, index=index
    )
    partition.weights = lambda: torch.empty(0, dtype=torch.bfloat16)
    none: Any = None
    blocks, grad = drawn(partition, BLOCK, most_blocks, seed), torch.arange(numel).bfloat16()
    return Sample(partition, grad, none, BLOCK, none, none, blocks), state[0]


@pytest.mark.parametrize("numel", [1, 3])
def test_a_partition_shorter_than_a_block_is_its_own_sample(numel: int) -> None:
    sample, master = sample_of(numel, 8)
    assert sample.blocks is None
    assert sample.state[0].tolist() == master.tolist()
    assert sample.state[0].data_ptr() != master.data_ptr(), (
        "a copy: the worker changes the partition"
    )


@pytest.mark.parametrize(
    ("numel", "most", "count"), [(4, 8, 1), (11, 8, 2), (400, 8, 8), (402, 100, 100), (401, 1, 1)]
)
def test_whole_blocks_are_drawn_from_all_parts_of_the_partition(
    numel: int, most: int, count: int
) -> None:
    whole = numel // BLOCK
    for seed in range(20):
        sample, _ = sample_of(numel, most, seed)
        assert sample.blocks is not None
        blocks = sample.blocks.tolist()
        assert len(set(blocks)) == count
        for number, block in enumerate(blocks):
            assert (
                int(number * whole / count) <= block <= min(whole - 1, (number + 1) * whole / count)
            )
        elements = [block * BLOCK + inside for block in blocks for inside in range(BLOCK)]
        assert sample.state[0].tolist() == elements
        assert sample.state[2].tolist() == [2000.0 + element for element in elements]


@pytest.mark.parametrize("numel", [3, 402])
def test_moments_that_are_codes_are_decoded(numel: int) -> None:
    numbers, blocks = torch.arange(numel), -(-numel // BLOCK)
    codes = (numbers % 100 - 50).to(torch.int8), (numbers % 200).to(torch.uint8)
    scales = tuple((100 + torch.arange(blocks) % 20).to(torch.uint8) for _ in codes)
    partition: Any = SimpleNamespace(master=numbers.float(), moments=codes, scales=scales, index=0)
    partition.weights = lambda: torch.empty(0, dtype=torch.bfloat16)
    none: Any = None
    sample = Sample(
        partition, numbers.bfloat16(), none, BLOCK, none, none, drawn(partition, BLOCK, 8, 1)
    )
    for moment, of_moment, found in zip(codes, scales, sample.state[1:], strict=True):
        whole = torch.empty(numel)
        decode(moment, of_moment, BLOCK, whole)
        assert torch.equal(found, sample.of(whole))


@pytest.mark.parametrize("numel", [3, 400])
def test_the_newest_gradient_is_kept_because_y_replaces_it(numel: int) -> None:
    sample, _ = sample_of(numel, 8)
    assert sample.newest.dtype is torch.bfloat16
    assert torch.equal(sample.newest, sample.of(torch.arange(numel).bfloat16()))


def test_seeds_and_partitions_draw_other_blocks() -> None:
    drawn = [
        tuple(sample_of(4000, 8, seed, index)[0].blocks.tolist())
        for seed in range(4)
        for index in range(4)
    ]
    assert len(set(drawn)) == len(drawn)
    assert drawn[0] == tuple(sample_of(4000, 8, 0, 0)[0].blocks.tolist())


@pytest.mark.parametrize(("dtype", "rounding"), [(torch.float32, 0.0), (torch.bfloat16, 0.25)])
def test_errors_are_distances_from_what_the_worker_has_computed(
    dtype: torch.dtype, rounding: float
) -> None:
    sample, master = sample_of(16, 8)
    master.fill_(128.25)  # bf16 has steps of 1 here
    sample.state[0].fill_(126.25)

    def predicted() -> torch.Tensor:
        return torch.full((16,), 129.0, dtype=dtype)

    sample.predicted = predicted  # type: ignore[method-assign]
    errors = sample.errors()
    assert errors.prediction == pytest.approx(4 * 0.75)
    assert errors.update == pytest.approx(4 * 2.0)
    assert errors.rounding == pytest.approx(max(4 * rounding, 4 * 128.25 * 2.0**-24))


def test_a_sample_of_lion_predicts_by_the_formula_of_its_estimate() -> None:
    generator = torch.Generator().manual_seed(1)
    p, m, grad = (torch.randn(2 * BLOCK, generator=generator) for _ in range(3))
    partition: Any = SimpleNamespace(
        master=p, moments=(m,), scales=(), ring=(), index=0, publish_dtype=torch.float32
    )
    partition.weights = lambda: torch.empty(0)
    step = LionStep(lr=0.5, beta1=0.9, beta2=0.99, weight_decay=0.5, step=2, grad_scale=1.0)
    kind = LionKind(torch.optim.SGD([torch.zeros(1)]))
    sample = Sample(partition, grad, kind, BLOCK, step, step, drawn(partition, BLOCK, 8, 1))
    means = m.view(-1, BLOCK).abs().mean(1).repeat_interleave(BLOCK)
    direction = 0.9 * means.copysign(m) + (1.0 - 0.9) * grad
    torch.testing.assert_close(sample.predicted(), 0.75 * p - 0.5 * direction.sign())
