"""`tests.perf.same_bits` finds what differs: one bit of a loss or of a checkpoint, and what only
one side has."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from tests.perf.same_bits import VARIANTS, Gap, apart, checkpoint, losses_apart


@dataclass
class Held:
    values: list[torch.Tensor]


def test_a_checkpoint_that_differs_in_one_bit_is_told_from_one_that_does_not(
    tmp_path: Path,
) -> None:
    p = torch.arange(8.0)
    state = {"step": 3, "states": [{"p": p}], "held": Held([torch.zeros(2)])}
    for side in ("before", "now"):
        folder = tmp_path / side / "ranks"
        folder.mkdir(parents=True)
        torch.save(state, folder / "rank0.pt")
        p[5] = torch.nextafter(torch.tensor(5.0), torch.tensor(6.0))
    before, now = (checkpoint(tmp_path / side) for side in ("before", "now"))
    names = ["held/values/0", "states/0/p", "step"]
    assert sorted(before) == [f"ranks/rank0.pt/{name}" for name in names]
    assert apart(before, before) == ""
    told = "1 of 11 elements, in 1 of 3 arrays, first ranks/rank0.pt/states/0/p"
    assert apart(before, now) == told
    zero = {"x": torch.zeros(1)}
    assert apart(zero, {"x": -torch.zeros(1)}).startswith("1 of 1 elements"), "bits, not values"
    assert apart(zero, {"y": torch.zeros(1)}) == "only before: x; only now: y"
    assert "torch.float32 [1], torch.float32 [2]" in apart(zero, {"x": torch.zeros(2)})


def test_losses_are_compared_to_the_bit_on_every_rank() -> None:
    losses = [[(1.0).hex(), (0.5).hex()], [(1.0).hex(), (0.25).hex()]]
    other = [losses[0], [(1.0).hex(), (0.25 + 2**-54).hex()]]
    assert losses_apart(losses, losses) == Gap()
    assert losses_apart(losses, other, 31) == Gap(32, 2.0**-52)


def test_every_variant_gives_what_would_otherwise_be_measured() -> None:
    for name, variant in VARIANTS.items():
        for stage in variant.stages:
            config = variant.config(stage, is_new=True)
            section = config["zero_optimization"]["zenflow"]
            assert section["autotune"] is False, name
            assert {"update_interval", "full_warm_up_rounds"} <= section.keys(), name
