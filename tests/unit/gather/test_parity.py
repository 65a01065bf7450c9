"""Gathered singly or together, losses, parameters and checkpoints equal upstream's coalesced path
to the bit.

Uninitialised memory is filled with NaN in these runs: the padding of a partition is never written,
so a run in which any of it leaked into a parameter could not pass.
"""

from __future__ import annotations

import itertools

import pytest

from tests.support.gather import DTYPES, STEPS, WAYS, compare_gathers
from tests.support.matrix import cover
from tests.support.ranks import is_simulated, run_ranks

pytestmark = pytest.mark.sampled(8)

MIN_NUMELS = (0, 600, None)
MATRIX = list(itertools.product((1, 2, 3), DTYPES, (1, 3), MIN_NUMELS, WAYS))


# With 600, some parameters travel alone and some together, so 0 (all alone) is left to one case.
BY_DEFAULT = [
    *cover([case for case in MATRIX if case[3] != 0 and case[0] < 3]),
    (3, "fp32", 3, 600, "plain"),
]
BY_DEFAULT.append((2, "bf16", 1, 0, "plain"))


@pytest.mark.parametrize(
    ("world_size", "dtype", "accumulation", "min_numel", "way"),
    [
        *BY_DEFAULT,
        *(pytest.param(*case, marks=pytest.mark.full) for case in MATRIX if case not in BY_DEFAULT),
    ],
)
def test_equals_upstream(
    world_size: int, dtype: str, accumulation: int, min_numel: int | None, way: str
) -> None:
    for losses, plan, num_collectives in run_ranks(
        world_size, compare_gathers, dtype, accumulation, min_numel, way
    ):
        assert len(losses) == STEPS * accumulation
        assert losses[-1] < losses[0]
        if world_size == 1:
            assert plan is None  # nothing to gather: upstream's path is the only one
        else:
            assert not plan.reasons
            assert {mode.value for mode in plan.modes.values()} == {
                0: {"single"},
                600: {"single", "shared"},
                # all alone on an accelerator
                None: {"single" if is_simulated("cpu") else "shared"},
            }[min_numel]
            assert num_collectives > STEPS
