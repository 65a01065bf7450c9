"""Blocks of a flat partition: chosen by their gradients, taken out and put back, stepped as torch's
Adam does."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspeed_ext.zenflow.plan.selective import hot_blocks, most_hot_blocks
from deepspeed_ext.zenflow.rules.blocks import AdamBlocks, BlockSet, step_blocks
from deepspeed_ext.zenflow.rules.selective.selection import scores, select
from deepspeed_ext.zenflow.worker.kernel import AdamStep
from tests.support.thread_ranks import run_together


@st.composite
def flats_and_ids(draw: st.DrawFn) -> tuple[torch.Tensor, int, torch.Tensor]:
    numel, block_size = draw(st.integers(1, 200)), draw(st.integers(1, 40))
    count = -(-numel // block_size)
    ids = draw(st.lists(st.integers(0, count - 1), unique=True).map(sorted))
    flat = torch.arange(1, numel + 1, dtype=torch.float32)
    return flat, block_size, torch.tensor(ids, dtype=torch.int64)


def in_blocks(flat: torch.Tensor, block_size: int, ids: torch.Tensor) -> torch.Tensor:
    """Which elements belong to the blocks."""
    return torch.isin(torch.arange(flat.numel()) // block_size, ids)


@settings(deadline=None)
@given(flats_and_ids())
def test_what_is_taken_is_put_back_and_nothing_else_is_touched(
    case: tuple[torch.Tensor, int, torch.Tensor],
) -> None:
    flat, block_size, ids = case
    blocks = BlockSet(ids, flat.numel(), block_size)
    rows = blocks.take(flat)
    assert rows.shape == (len(ids), block_size)
    inside = in_blocks(flat, block_size, ids)
    assert torch.equal(rows[rows > 0], flat[inside])
    expected = torch.where(inside, -flat, flat)
    blocks.put(flat, -rows)
    assert torch.equal(flat, expected)


@pytest.mark.parametrize("betas", [(0.0, 0.99), (0.9, 0.0), (0.0, 0.0)])
def test_a_beta_of_zero_steps_as_torchs_adam(betas: tuple[float, float]) -> None:
    p, gradients = torch.randn(3, 8), torch.randn(4, 3, 8)
    blocks = AdamBlocks(
        BlockSet(torch.arange(3), 24, 8),
        p.clone(),
        torch.zeros(3, 8),
        torch.zeros(3, 8),
        torch.zeros(3, dtype=torch.int32),
    )
    expected = torch.nn.Parameter(p.clone())
    adam = torch.optim.AdamW([expected], lr=1e-2, betas=betas, weight_decay=0.1)
    for number, gradient in enumerate(gradients, start=1):
        found = blocks.step(
            gradient, AdamStep(1e-2, *betas, 1e-8, 0.1, decoupled=True, step=number, grad_scale=1.0)
        )
        expected.grad = gradient.clone()
        adam.step()
        torch.testing.assert_close(found, expected.detach())


@settings(deadline=None)
@given(
    st.integers(1, 4),
    st.integers(1, 30),
    st.integers(1, 9),
    st.sampled_from([0.01, 0.1, 0.5, 0.999]),
    st.integers(0, 99),
)
def test_the_blocks_with_the_largest_sums_are_selected(
    ranks: int, count: int, block_size: int, ratio: float, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    flats = torch.randn(ranks, count * block_size - block_size // 2, generator=generator)
    found = torch.stack([scores(flat, block_size) for flat in flats])
    expected = torch.stack(
        [torch.stack([b.abs().sum() for b in flat.split(block_size)]) for flat in flats]
    )
    torch.testing.assert_close(found, expected)
    chosen = run_together(ranks, lambda group: select(found[group.rank], ratio, group))
    share = math.ceil(ratio * count)
    assert sum(map(len, chosen)) == math.ceil(ratio * found.numel())
    lowest = min(float(row[ids].min()) for row, ids in zip(found, chosen, strict=True) if len(ids))
    for row, ids in zip(found, chosen, strict=True):
        assert ids.tolist() == sorted(set(ids.tolist()))
        assert len(ids) <= 2 * share
        left = torch.ones(count, dtype=torch.bool)
        left[ids] = False
        if left.any() and len(ids) < min(count, 2 * share):  # then nothing larger was left out
            assert row[left].max() <= lowest


def of_all_scores(everyones: torch.Tensor, ratio: float) -> list[list[int]]:
    """The choice with all scores at hand: first each rank's best, then the best of these."""
    most = most_hot_blocks(everyones.shape[1], ratio)
    best = torch.topk(everyones, most, dim=1)
    taken = torch.zeros(best.values.numel(), dtype=torch.bool)
    taken[torch.topk(best.values.flatten(), hot_blocks(everyones.numel(), ratio)).indices] = True
    return [
        sorted(ids[row].tolist())
        for ids, row in zip(best.indices, taken.view(best.values.shape), strict=True)
    ]


@pytest.mark.parametrize("scale", [1e-42, 1e-20, 1.0, 1e30])
@pytest.mark.parametrize("ratio", [0.02, 0.1, 0.7])
def test_the_selection_is_that_of_all_scores(ratio: float, scale: float) -> None:
    """Also for scores of other sizes on each rank, of denormal numbers, and with the largest
    float."""
    generator = torch.Generator().manual_seed(0)
    everyones = (
        torch.randn(5, 200, generator=generator).abs()
        * torch.tensor([1, 2, 8, 1e-3, 1])[:, None]
        * scale
    )
    everyones[1, 7] = torch.inf
    assert len(set(everyones.flatten().tolist())) > (100 if scale == 1e-42 else 990)
    found = run_together(5, lambda group: select(everyones[group.rank], ratio, group))
    if scale == 1e-42:  # too few different numbers for one choice: compare the scores
        expected = [
            everyones[rank][ids].sort().values
            for rank, ids in enumerate(of_all_scores(everyones, ratio))
        ]
        assert torch.equal(
            torch.cat([everyones[rank][ids] for rank, ids in enumerate(found)]).sort().values,
            torch.cat(expected).sort().values,
        )
    else:
        assert [ids.tolist() for ids in found] == of_all_scores(everyones, ratio)


def test_of_equal_scores_the_first_are_selected() -> None:
    everyones = torch.tensor([[0.0, 0, 0, 0], [0, 0, 5, 0], [0, 3, 0, 0]])
    found = run_together(3, lambda group: select(everyones[group.rank], 0.4, group))
    assert sum(map(len, found)) == 5
    assert [ids.tolist() for ids in found][1:] == [[2], [1]]


@pytest.mark.parametrize("decoupled", [True, False])
def test_steps_are_torchs_with_an_update_count_for_each_block(decoupled: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    numel, block_size, before = 100, 8, [0, 3, 500]
    start = torch.randn(numel, generator=generator)
    gradients = torch.randn(505, numel, generator=generator)
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    settings = {"lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}
    step = AdamStep(1e-2, 0.9, 0.999, 1e-8, 0.1, decoupled, 1, 0.25)
    blocks = BlockSet(torch.tensor([1, 7, 12]), numel, block_size)  # the last one is short
    references = []
    for count in before:
        parameter = torch.nn.Parameter(start.clone())
        optimizer = kind([parameter], **settings)
        for gradient in gradients[:count]:
            parameter.grad = gradient.clone()
            optimizer.step()
        references.append((parameter, optimizer))

    def stacked(name: str) -> torch.Tensor:
        def array(parameter: torch.nn.Parameter, optimizer: torch.optim.Optimizer) -> torch.Tensor:
            return (
                parameter.detach()
                if name == "p"
                else optimizer.state[parameter].get(name, torch.zeros(numel))
            )

        return torch.stack(
            [blocks.take(array(*reference))[row] for row, reference in enumerate(references)]
        )

    updates = torch.tensor(before, dtype=torch.int32)
    state = AdamBlocks(blocks, stacked("p"), stacked("exp_avg"), stacked("exp_avg_sq"), updates)
    for gradient in gradients[500:]:
        assert torch.equal(state.step(blocks.take(gradient) * 4, step), state.p)
        for parameter, optimizer in references:
            parameter.grad = gradient.clone()
            optimizer.step()
    assert state.updates.tolist() == [5, 8, 505]
    for name, actual in (("p", state.p), ("exp_avg", state.m), ("exp_avg_sq", state.v)):
        torch.testing.assert_close(actual, stacked(name), rtol=2e-5, atol=2e-6)


def test_without_bias_correction_blocks_step_as_after_many_updates() -> None:
    """So many that the correction has faded."""
    blocks, gradient = BlockSet(torch.arange(3), 24, 8), torch.randn(3, 8)
    state, found = torch.rand(3, 3, 8), []
    for updates, corrects in ((0, False), (10**6, True)):
        p, m, v = state.clone().unbind()
        step = AdamStep(1e-2, 0.9, 0.95, 1e-8, 0.1, True, 1, 0.5, corrects)
        AdamBlocks(blocks, p, m, v, torch.full((3,), updates, dtype=torch.int32)).step(
            gradient, step
        )
        found.append(torch.stack([p, m, v]))
    assert torch.equal(*found)


def test_all_blocks_step_in_place_but_those_that_are_left_out() -> None:
    numel, block_size = 37, 8  # the last block is short
    generator = torch.Generator().manual_seed(0)
    state = [torch.rand(numel, generator=generator) for _ in "pmv"]
    before = [array.clone() for array in state]
    gradient = torch.randn(numel, generator=generator)
    counts = torch.tensor([0, 3, 500, 1, 2], dtype=torch.int32)
    step = AdamStep(1e-2, 0.9, 0.999, 1e-8, 0.1, True, 1, 1.0)
    step_blocks(state, block_size, counts, torch.tensor([1, 3]), gradient, step)
    blocks = BlockSet(torch.tensor([0, 2, 4]), numel, block_size)
    p, m, v = (blocks.take(array) for array in before)
    AdamBlocks(blocks, p, m, v, counts[[0, 2, 4]]).step(blocks.take(gradient), step)
    for array, stepped in zip(before, (p, m, v), strict=True):
        blocks.put(array, stepped)
    assert all(map(torch.equal, state, before))
    assert counts.tolist() == [0, 3, 500, 1, 2]
