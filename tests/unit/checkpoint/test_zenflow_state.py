"""ZenFlow's checkpoints are DeepSpeed's: ZeRO-Offload and DeepSpeed's tools read them, and ZenFlow
reads theirs."""

import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed import comm as dist
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

from deepspeed_ext.errors import CheckpointError
from deepspeed_ext.zenflow.worker.kernel.definition import step_in_fp32
from tests.support.forked import run_forked
from tests.support.models import OddModel, batches
from tests.support.ranks import run_ranks
from tests.support.same import assert_same
from tests.support.zenflow import full_masters_of, make_engine, train, weights_of, zenflow_config

pytestmark = pytest.mark.sampled(4)

STAGES = [1, 2, 3]


def save_after_7(config: dict, folder: str) -> tuple[dict, dict]:
    engine = make_engine(config)
    train(engine, batches(7, dist.get_rank()))
    engine.save_checkpoint(folder, tag="t")
    weights = weights_of(engine)
    masters = dict(zip(weights, full_masters_of(engine), strict=True))
    engine.destroy()
    return weights, masters


@pytest.mark.parametrize("stage", STAGES)
def test_zero_to_fp32_gives_masters_not_predictions(stage: int, tmp_path: Path) -> None:
    config = zenflow_config(stage, full_warm_up_rounds=2)
    weights, masters = run_ranks(2, save_after_7, config, str(tmp_path))[0]
    found = get_fp32_state_dict_from_zero_checkpoint(str(tmp_path), tag="t")
    for name, value in weights.items():
        assert_same(masters[name], found[name], name)
        assert not torch.equal(found[name], value)


def as_of_interval_2(folder: Path) -> None:
    """Copy a checkpoint as an earlier release saved it in the middle of an interval of two steps,
    with a gradient that was not handed over."""
    shutil.copytree(folder / "t", folder / "old")
    for path in (folder / "old").glob("*optim_states.pt"):
        content = torch.load(path, weights_only=False)
        state = content["optimizer_state_dict"]["deepspeed_ext_zenflow"]
        state["schedule"]["interval"], state["updates"] = 2, state["updates"] + 1
        for each in state["partitions"]:
            numel = each["numel"] - each["on_accelerator"]
            gradient = torch.linspace(-1.0, 1.0, numel).bfloat16()
            each["collected"] = [each["last"] | {"step": each["last"]["step"] + 1}]
            each["gradients"], each["drift"] = [gradient], torch.zeros_like(gradient)
        torch.save(content, path)


def load_as_it_was_and_of_interval_2(config: dict, folder: str) -> dict[str, Any]:
    engine = make_engine(config)
    host, expected = engine.optimizer.host_optimizer, []
    engine.load_checkpoint(folder, tag="t")
    for state, partition, rule in zip(
        host.state.wholes, host.state.partitions, host.rule.states, strict=True
    ):
        arrays = [array.detach().clone() for array in state.arrays]
        head = state.master.numel() - partition.master.numel()
        gradient = torch.linspace(-1.0, 1.0, partition.master.numel()).bfloat16()
        step = replace(rule.last, step=rule.last.step + 1)
        kept = [array[head:] for array in arrays]
        step_in_fp32(host.kind.layout, kept, gradient, step, 32, head)
        expected.append(arrays)
    engine.load_checkpoint(folder, tag="old")
    found = [[array.detach().clone() for array in state.arrays] for state in host.state.wholes]
    updates, losses = host.state.updates, train(engine, batches(6, dist.get_rank(), seed=3))
    engine.destroy()
    return {"expected": expected, "found": found, "updates": updates, "losses": losses}


@pytest.mark.parametrize(
    ("stage", "states", "ratio"),
    [(2, "float32", 1.0), (3, "float32", 0.5), (2, "bfloat16", 1.0), (3, "int8", 1.0)],
)
def test_a_gradient_that_an_earlier_release_had_not_handed_over_is_applied(
    stage: int, states: str, ratio: float, tmp_path: Path
) -> None:
    config = zenflow_config(stage, full_warm_up_rounds=2, state_dtype=states)
    config["zero_optimization"]["offload_optimizer"] = {"device": "cpu", "ratio": ratio}
    run_ranks(2, save_after_7, config, str(tmp_path))
    as_of_interval_2(tmp_path)
    for rank in run_ranks(2, load_as_it_was_and_of_interval_2, config, str(tmp_path)):
        assert_same(rank["expected"], rank["found"])
        assert rank["updates"] == 8
        assert max(rank["losses"]) < 1.1 * rank["losses"][0]


def load_universal(config: dict, folder: str) -> dict[str, Any]:
    config = {**config, "checkpoint": {"load_universal": True}}
    engine = make_engine(config)
    engine.load_checkpoint(folder, tag="u")
    adam = engine.optimizer.host_optimizer
    found = {"updates": adam.state.updates, "masters": {}, "lengths": []}
    for name, parameter in engine.module.named_parameters():
        found["masters"][name] = safe_get_full_fp32_param(parameter).cpu().clone()
        found["lengths"].append(
            safe_get_full_optimizer_state(parameter, "exp_avg_sq").norm().item()
        )
    found["losses"] = train(engine, batches(4, 0))
    engine.destroy()
    return found


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("stage", "states"), [(2, "float32"), (3, "float32"), (2, "int8"), (3, "int8")]
)
def test_universal_checkpoint_resumes_with_other_ranks(
    stage: int, states: str, tmp_path: Path
) -> None:
    config = zenflow_config(stage, state_dtype=states)
    run_ranks(2, save_after_7, config, str(tmp_path))
    expected = get_fp32_state_dict_from_zero_checkpoint(str(tmp_path), tag="t")
    tool = ("deepspeed.checkpoint.ds_to_universal", "--inject_missing_state")
    folders = ("--input_folder", str(tmp_path / "t"), "--output_folder", str(tmp_path / "u"))
    converted = run_forked(*tool, *folders, environment=os.environ)
    assert converted.returncode == 0, converted.stdout + converted.stderr
    one = run_ranks(1, load_universal, config, str(tmp_path))[0]
    assert one["updates"] == 7
    assert_same({name: expected[name] for name in one["masters"]}, one["masters"])
    assert min(one["lengths"]) > 0.0
    assert max(one["losses"]) < 1.1 * one["losses"][0]


def save_beside(config: dict, folder: str) -> list[str]:
    """Save a checkpoint, then the model alone into the same folder, as exports do; returns the
    model's keys."""
    engine = make_engine(config)
    train(engine, batches(3, dist.get_rank()))
    engine.save_checkpoint(folder)
    assert engine.save_16bit_model(folder)
    path, _ = engine.load_checkpoint(folder)
    assert path is not None
    engine.destroy()
    return sorted(torch.load(Path(folder, "pytorch_model.bin"), weights_only=True))


@pytest.mark.parametrize("stage", [2, 3])
def test_a_model_saved_beside_a_checkpoint_leaves_it_whole(stage: int, tmp_path: Path) -> None:
    """DeepSpeed saves the model alone through the checkpoint engine, too, under the tag of a
    checkpoint."""
    config = zenflow_config(stage)
    config["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] = True
    (keys, _) = run_ranks(2, save_beside, config, str(tmp_path))
    assert keys == sorted(OddModel().state_dict())


def save_where_nothing_can_be(config: dict, folder: str) -> str:
    engine = make_engine(config)
    message = "saved"
    try:
        engine.save_16bit_model(f"{folder}/file")
    except CheckpointError as error:
        message = str(error)
    engine.destroy()
    return message


def test_a_model_that_cannot_be_saved_is_an_error_on_every_rank(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("of the user")
    for message in run_ranks(2, save_where_nothing_can_be, zenflow_config(2), str(tmp_path)):
        assert "the model was not saved: rank 0: FileExistsError" in message
