"""From one rule, interval or block size to another, and to plain ZeRO-Offload and back: nothing is
lost."""

from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed import comm as dist

from deepspeed_ext.zenflow.rules.selective import SelectiveRule
from tests.support.log import heard
from tests.support.models import batches, two_groups
from tests.support.ranks import run_ranks
from tests.support.zenflow import make_engine, masters_of, offload_config, train, zenflow_config

pytestmark = pytest.mark.sampled(2)

SELECTIVE = {"topk_ratio": 0.1, "full_warm_up_rounds": 2}


def masters_and_hot(engine: Any) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """p of every partition, and which of its elements are hot."""
    masters = masters_of(engine)
    adam = getattr(engine.optimizer, "host_optimizer", None)
    hot = [torch.zeros(master.numel(), dtype=torch.bool) for master in masters]
    rule = None if adam is None else adam.rule
    for mask, state in zip(
        hot, rule.states if isinstance(rule, SelectiveRule) else (), strict=False
    ):
        blocks = torch.arange(mask.numel()) // rule.block_size
        mask |= torch.isin(blocks, state.hot.ids.cpu())
    return masters, hot


def save_here_load_there(here: dict, there: dict, folder: str, steps: int) -> dict[str, Any]:
    rank = dist.get_rank()
    engine = make_engine(here, groups=two_groups, extended="zenflow" in here["zero_optimization"])
    train(engine, batches(steps, rank))
    saved, hot = masters_and_hot(engine)
    engine.save_checkpoint(folder, tag="t")
    engine.destroy()
    engine = make_engine(there, groups=two_groups, extended="zenflow" in there["zero_optimization"])
    with heard("the checkpoint's moments") as told:
        engine.load_checkpoint(folder, tag="t")
    loaded = masters_of(engine)
    adam = getattr(engine.optimizer, "host_optimizer", None)
    updates = adam.state.updates if adam else steps
    losses = train(engine, batches(10, rank))
    engine.destroy()
    found = {"saved": saved, "hot": hot, "loaded": loaded, "updates": updates, "losses": losses}
    return found | {"told": [text for _, text in told]}


RULES = {
    "predictive": {"full_warm_up_rounds": 2},
    "selective": {**SELECTIVE, "update_interval": 2, "select_interval": 4, "overlap_step": True},
    "another interval": {**SELECTIVE, "update_interval": 3, "select_interval": 6},
    "other blocks": {**SELECTIVE, "update_interval": 2, "select_interval": 4, "block_size": 64},
}


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize(
    ("here", "there", "applied"),
    [
        ("selective", "predictive", True),
        ("predictive", "selective", False),
        ("selective", "another interval", False),
        ("selective", "other blocks", True),
        ("selective", "ZeRO-Offload", False),
        ("ZeRO-Offload", "selective", False),
    ],
)
def test_other_settings_go_on_from_the_exact_state(
    stage: int, here: str, there: str, applied: bool, tmp_path: Path
) -> None:
    """Seven steps leave one gradient that is collected and not handed over. It is not lost: the
    blocks that it is for move on by it, the hot ones have had it. At another interval it stays
    collected. Plain ZeRO-Offload knows nothing of it, and gets masters to the bit."""

    def config(name: str) -> dict:
        plain = zenflow_config(stage, torch.float32, lr=1e-2, **RULES.get(name, {}))
        return offload_config(plain) if name == "ZeRO-Offload" else plain

    found = run_ranks(1, save_here_load_there, config(here), config(there), str(tmp_path), 7)[0]
    assert found["updates"] == 7
    for saved, hot, loaded in zip(found["saved"], found["hot"], found["loaded"], strict=True):
        moved = saved != loaded
        assert not moved[hot].any()
        assert moved[~hot].float().mean() > 0.9 if applied else not moved.any()
        assert (saved - loaded).abs().max() < 3e-2  # a step of 1e-2
    assert found["losses"][-1] < found["losses"][0]


@pytest.mark.parametrize(
    ("here", "there", "says"),
    [
        ("int8", {"state_dtype": "int8"}, []),
        ("int8", {"state_dtype": "int8", "block_size": 64}, ["they are rounded once more"]),
        ("float32", {"state_dtype": "bfloat16"}, ["they are rounded to it"]),
        ("bfloat16", {"state_dtype": "float32"}, ["they are converted, which changes no value"]),
    ],
)
def test_a_load_says_how_it_converts_moments(
    here: str, there: dict[str, Any], says: list[str], tmp_path: Path
) -> None:
    configs = [zenflow_config(2, **fields) for fields in ({"state_dtype": here}, there)]
    (found,) = run_ranks(1, save_here_load_there, *configs, str(tmp_path), 3)
    assert [text.rpartition(": ")[2] for text in found["told"]] == says
