"""The selective rule: AdamW of hot blocks every step and of cold ones every interval, the same on
every rank."""

from __future__ import annotations

import math
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed import comm as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspeed_ext.config import ZenFlowConfig
from deepspeed_ext.runtime.ranks import RankGroup
from deepspeed_ext.zenflow.plan.facts import Caller
from deepspeed_ext.zenflow.plan.places import Source
from deepspeed_ext.zenflow.plan.rule import SelectiveSettings, settings_of
from deepspeed_ext.zenflow.rules.selective import SelectivePlan, SelectiveSchedule
from deepspeed_ext.zenflow.start import ZenFlowStart, start_optimizer
from tests.support.models import batches, on_device, two_groups
from tests.support.ranks import run_ranks
from tests.support.same import assert_same, first_difference
from tests.support.zenflow import full_masters_of, make_engine, train, weights_of, zenflow_config

pytestmark = pytest.mark.sampled(4)

STAGES = [1, 2, 3]
BLOCK, RATIO = 16, 0.25
LR, BETAS, EPS, DECAY = 1e-2, (0.9, 0.95), 1e-8, 0.1


class Simulated:
    """The rule in double precision for one partition, without moving blocks of state."""

    def __init__(self, start: torch.Tensor, interval: int, *, overlapped: bool, every: int) -> None:
        self.p, self.interval = start.double(), interval
        self.overlapped, self.every = overlapped, every
        self.m, self.v = torch.zeros_like(self.p), torch.zeros_like(self.p)
        self.hot = torch.zeros_like(self.p, dtype=torch.bool)
        self.shown = self.p.clone()
        self.collected: list[torch.Tensor] = []
        self.is_due = False
        self.steps = self.cold_steps = 0

    def adam(self, which: torch.Tensor, gradient: torch.Tensor, t: int) -> None:
        g = gradient[which]
        self.m[which] = BETAS[0] * self.m[which] + (1 - BETAS[0]) * g
        self.v[which] = BETAS[1] * self.v[which] + (1 - BETAS[1]) * g * g
        denominator = (self.v[which] / (1 - BETAS[1] ** t)).sqrt() + EPS
        self.p[which] = (
            self.p[which] * (1 - LR * DECAY)
            - LR * self.m[which] / (1 - BETAS[0] ** t) / denominator
        )

    def select(self, gradient: torch.Tensor) -> None:
        """Blocks that change sides keep their corrected moments."""
        blocks = len(gradient) // BLOCK
        sums = gradient[: blocks * BLOCK].view(blocks, BLOCK).abs().sum(1)
        chosen = sums.topk(math.ceil(RATIO * blocks)).indices
        hot = torch.isin(torch.arange(len(gradient)) // BLOCK, chosen)
        for moment, beta in ((self.m, BETAS[0]), (self.v, BETAS[1])):
            factor = (1 - beta**self.steps) / (1 - beta**self.cold_steps)
            moment[hot & ~self.hot] *= factor
            moment[self.hot & ~hot] /= factor
        self.hot = hot

    def step(self, gradient: torch.Tensor) -> torch.Tensor:
        gradient, self.steps = gradient.double(), self.steps + 1
        self.adam(self.hot, gradient, self.steps)
        self.collected.append(gradient)
        if self.is_due:
            self.shown[~self.hot], self.is_due = self.p[~self.hot], False
        is_first = self.steps == 1
        if is_first or len(self.collected) == self.interval:
            selects = is_first or (self.steps - 1) % self.every == 0
            self.cold_steps += 1
            self.adam(~self.hot, torch.stack(self.collected).mean(0), self.cold_steps)
            self.collected, self.is_due = [], self.overlapped and not selects
            if not self.is_due:
                self.shown = self.p.clone()
            if selects:
                self.select(gradient)
        self.shown[self.hot] = self.p[self.hot]
        return self.shown


def compare_with_simulation(
    numel: int, interval: int, overlapped: bool, every: int, steps: int
) -> list[float]:
    """Largest difference of the weights after each step, for one partition of random gradients."""
    generator = torch.Generator().manual_seed(7)
    start = torch.randn(numel, generator=generator)
    scale = torch.rand(numel, generator=generator).pow(3)
    weights = on_device(start.clone())
    settings = ZenFlowConfig(
        update_interval=interval,
        overlap_step=overlapped,
        topk_ratio=RATIO,
        select_interval=every,
        block_size=BLOCK,
    )
    optimizer = torch.optim.AdamW(
        [torch.nn.Parameter(start)], lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY
    )
    ranks = RankGroup.of(None, weights.device)
    begin, caller = ZenFlowStart(settings, ranks, ExitStack()), Caller("float32", "float32")
    adam = start_optimizer(begin, optimizer, [0], lambda index: weights, caller, ranks)
    optimizer.param_groups[0]["params"] = adam.state.masters
    simulated = Simulated(start, interval, overlapped=overlapped, every=every)
    found = []
    for number in range(steps):
        gradient = torch.randn(numel, generator=generator) * scale.roll(number)
        adam.begin_step()
        factor = 8.0 * 2 ** (number // 2 % 3)  # as a loss scale that changes
        sign = -1.0 if number % 5 == 4 else 1.0
        optimizer.param_groups[0]["maximize"] = sign < 0.0
        adam.step_partition(0, on_device(gradient * factor * sign), 1.0 / factor)
        adam.finish_weights()
        adam.end_step()
        expected = simulated.step(gradient)
        found.append(float((weights.cpu().double() - expected).abs().max()))
        if number % 5 == 3:
            adam.state.drain()
            off = adam.state.partitions[0].master.double() - simulated.p
            found.append(float(off.abs().max()))
    adam.close()
    return found


@pytest.mark.parametrize("numel", [400, 391, BLOCK - 1])
@pytest.mark.parametrize(
    ("interval", "overlapped", "every"), [(1, False, 4), (1, True, 4), (3, False, 6), (3, True, 6)]
)
def test_every_step_equals_the_simulation(
    numel: int, interval: int, overlapped: bool, every: int
) -> None:
    """Fp32 against double: after 24 steps of 1e-2 an element may have rounded a few dozen times."""
    how = numel, interval, overlapped, every, 24
    for error in run_ranks(1, compare_with_simulation, *how)[0]:
        assert error < 2e-5


def weights_and_changes(config: dict, steps: int) -> dict[str, Any]:
    engine = make_engine(config, groups=two_groups)
    optimizer = engine.optimizer
    data, trace = batches(steps, dist.get_rank()), []
    before = weights_of(engine)
    for batch in data:
        train(engine, [batch])
        after = weights_of(engine)
        changed = sum(int((after[name] != value).sum()) for name, value in before.items())
        trace.append(changed)
        before = after
    hot = [len(state.hot.ids) for state in optimizer.host_optimizer.rule.states]
    blocks = [part.master.numel() // 32 for part in optimizer.host_optimizer.state.partitions]
    masters = full_masters_of(engine)
    engine.destroy()
    return {"weights": before, "trace": trace, "hot": hot, "blocks": blocks, "masters": masters}


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("stage", STAGES)
def test_between_results_only_hot_blocks_change(stage: int, lag: int) -> None:
    """Step 1 is exact; then intervals of 4: results are taken over at steps 5, 9, 13 or, with a lag
    of 1, one later unless blocks are selected (9, 17)."""
    section = {"topk_ratio": 0.1, "update_interval": 4, "select_interval": 8}
    config = zenflow_config(stage, torch.float32, **section, overlap_step=lag > 0)
    first, second = run_ranks(2, weights_and_changes, config, 16)
    assert_same(first["weights"], second["weights"], "weights of rank 1")
    everything = {1, 5, 9, 13} if lag == 0 else {1, 6, 9, 14}
    total = sum(weight.numel() for weight in first["weights"].values())
    limit = 32 * sum(first["hot"] + second["hot"])
    for step, changed in enumerate(first["trace"], start=1):
        if step in everything:
            assert changed > 0.8 * total
        else:
            assert 0 < changed <= limit
    for hot, blocks in zip(first["hot"], first["blocks"], strict=True):
        assert hot == -(-blocks // 10)
    if lag == 0:
        assert_same(first["masters"], list(first["weights"].values()), "weights")


def weights_loaded_alone(config: dict, folder: str) -> str:
    """How p differs from the weights that a run with hot blocks has loaded."""
    engine = make_engine(config)
    engine.save_checkpoint(folder, tag="t")
    saved = full_masters_of(engine)
    train(engine, batches(4, 0))
    engine.load_checkpoint(folder, tag="t", load_optimizer_states=False)
    return first_difference(saved, full_masters_of(engine), "masters")


def test_weights_that_are_loaded_alone_replace_those_of_hot_blocks(tmp_path: Path) -> None:
    config = zenflow_config(2, torch.float32, topk_ratio=0.1, update_interval=2)
    assert run_ranks(1, weights_loaded_alone, config, str(tmp_path)) == [""]


def make(
    interval: int, overlapped: bool, select_interval: int | None = None, warm_up: int = 1
) -> SelectiveSchedule:
    config = ZenFlowConfig(
        topk_ratio=0.1,
        update_interval=interval,
        overlap_step=overlapped,
        select_interval=select_interval,
        full_warm_up_rounds=warm_up,
    )
    settings = settings_of(config)
    assert isinstance(settings, SelectiveSettings)
    return SelectiveSchedule(settings, Source.BACKWARD)


def walk(schedule: SelectiveSchedule, steps: int) -> list[SelectivePlan]:
    plans = []
    for _ in range(steps):
        plans.append(schedule.plan())
        schedule.advance(plans[-1])
    return plans


def test_interval_three_as_drawn_in_the_module() -> None:
    plans = walk(make(3, True, 6), 10)
    assert [p.handed_over for p in plans] == [1, 0, 0, 1, 0, 0, 1, 0, 0, 1]
    assert [p.collected for p in plans] == [0, 0, 1, 2, 0, 1, 2, 0, 1, 2]
    assert [p.waits_first for p in plans] == [False] * 4 + [True] + [False] * 5
    assert [p.waits_last for p in plans] == [True] + [False] * 5 + [True] + [False] * 3
    assert [p.selects for p in plans] == [True] + [False] * 5 + [True] + [False] * 3


def test_an_interval_ends_before_a_longer_warm_up_begins() -> None:
    before, after = (make(3, True, warm_up=steps) for steps in (1, 9))
    walk(before, 3)
    after.state = before.state
    assert [p.collected for p in walk(after, 3)] == [2, 0, 0]


schedules = st.integers(1, 6).flatmap(
    lambda interval: st.tuples(
        st.just(interval),
        st.booleans(),
        st.one_of(st.none(), st.integers(interval, 30)),
        st.integers(0, 5),
    )
)


@settings(deadline=None)
@given(schedules, st.integers(0, 80))
def test_every_gradient_counts_once_and_no_slot_in_flight_is_written(
    settings: tuple[int, bool, int | None, int], steps: int
) -> None:
    interval, overlapped, _, warm_up = settings
    schedule = make(*settings)
    collected, slot_in_flight, last_selection = 0, None, -1
    for number in range(steps):
        plan = schedule.plan()
        assert schedule.coming != slot_in_flight, "gradients arrive in backward, before the step"
        assert plan.collected == collected
        assert plan.waits_first == (slot_in_flight is not None)
        assert plan.handed_over == (number < max(1, warm_up) or collected + 1 == interval)
        slot_in_flight = schedule.coming if plan.handed_over and not plan.waits_last else None
        collected = 0 if plan.handed_over else collected + 1
        if plan.selects:
            assert plan.waits_last
            assert (number - last_selection) % interval == 0 or last_selection < 0
            last_selection = number
        assert overlapped or plan.waits_last == bool(plan.handed_over)
        schedule.advance(plan)


@pytest.mark.parametrize("before", [2, 4, 6])
def test_a_saved_position_continues_also_with_another_interval(before: int) -> None:
    whole = walk(make(4, True, 8, 3), 40)
    for stop in range(20):
        schedule = make(4, True, 8, 3)
        walk(schedule, stop)
        again = make(4, True, 8, 3)
        again.load(schedule.state)
        assert walk(again, 40 - stop) == whole[stop:]
        changed = make(before, False)
        changed.load(schedule.state)
        assert max(plan.collected for plan in walk(changed, 20)[7:]) < before
