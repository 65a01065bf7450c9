"""A checkpoint of any number of ranks, ZeRO stage and rule resumes on any other: p, m, v and step
to the bit."""

from __future__ import annotations

import itertools
import math
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed import comm as dist
from deepspeed.utils import safe_get_full_fp32_param

from deepspeed_ext.errors import CheckpointError
from tests.support.matrix import cover
from tests.support.models import two_groups
from tests.support.ranks import run_ranks
from tests.support.resharded import (
    STEPS,
    Model,
    Run,
    beside,
    data,
    resume,
    save,
    saved_by,
    state_of,
)
from tests.support.same import assert_same, first_difference
from tests.support.zenflow import RULES, make_engine, train, weights_of

pytestmark = pytest.mark.sampled(12)

RUNS = [
    Run(*each)
    for each in itertools.product(
        (1, 2, 3, 4), (1, 2, 3), ("zero", "offload", "predictive", "selective")
    )
]


@pytest.fixture(scope="module")
def module_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("saved")


def cases() -> list[Any]:
    pairs = [
        (*one[:3], *other[:3])
        for one, other in itertools.product(RUNS, RUNS)
        if one[:2] != other[:2]
    ]
    chosen = set(cover(pairs))
    return [
        pytest.param(
            Run(*pair[:3]), Run(*pair[3:]), marks=() if pair in chosen else pytest.mark.full
        )
        for pair in pairs
    ]


@pytest.mark.parametrize(("saved", "resumed"), cases(), ids=lambda run: "-".join(map(str, run[:3])))
def test_everything_arrives_to_the_bit(saved: Run, resumed: Run, module_folder: Path) -> None:
    folder, expected = saved_by(saved, module_folder)
    same_layout = saved.ranks == resumed.ranks and max(saved.stage, resumed.stage) < 3
    goes_on = same_layout and saved.way == resumed.way and saved.way in RULES
    if saved.way == "selective" and not goes_on:
        folder = with_one_count(saved, folder)
    for difference, losses in run_ranks(
        resumed.ranks, resume, resumed, folder, pool=resumed.pool, goes_on=goes_on
    ):
        assert difference == ""
        # weights in 16 bits, predicted by one of them
        assert losses == pytest.approx(expected, rel=0.02)


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("saved", "resumed"),
    [
        (Run(2, 3, "predictive", "fp16"), Run(3, 2, "selective", "fp16")),
        (Run(2, 2, "selective", "fp32"), Run(3, 3, "predictive", "fp32")),
        (Run(2, 3, "predictive", "uncorrected"), Run(3, 2, "offload", "uncorrected")),
        # moments of fewer bits, also into those of 32
        (Run(2, 2, "predictive", "rounded"), Run(1, 3, "predictive", "rounded")),
        (Run(2, 3, "predictive", "rounded"), Run(3, 1, "predictive", "rounded")),
        (Run(2, 2, "predictive", "rounded"), Run(1, 1, "predictive", "bf16")),
        (Run(2, 3, "predictive", "rounded"), Run(1, 2, "offload", "bf16")),
        (Run(2, 2, "predictive", "coded"), Run(2, 2, "offload", "bf16")),
        (Run(2, 2, "predictive", "coded"), Run(1, 1, "predictive", "bf16")),
        (Run(2, 3, "predictive", "coded"), Run(1, 2, "offload", "bf16")),
        (Run(2, 2, "predictive", "lion"), Run(1, 3, "predictive", "lion")),
        (Run(2, 3, "predictive", "lion"), Run(3, 1, "predictive", "lion")),
        (Run(2, 1, "offload", "lion"), Run(1, 2, "predictive", "lion")),
        (Run(2, 3, "predictive", "lion"), Run(1, 2, "offload", "lion")),
        # in one layout, also to steps that do not overlap
        *((Run(2, s, "predictive"), Run(2, s, "exact")) for s in (2, 3)),
        *((Run(2, s, "selective"), Run(2, s, "waiting")) for s in (1, 2)),
        *((Run(2, s, "predictive", "fp32"), Run(2, s, "offload", "fp32")) for s in (1, 2, 3)),
        *((Run(2, s, "offload", "fp32"), Run(2, s, "predictive", "fp32")) for s in (1, 2, 3)),
    ],
    ids=lambda run: "-".join(map(str, run)),
)
def test_other_settings(saved: Run, resumed: Run, module_folder: Path) -> None:
    test_everything_arrives_to_the_bit(saved, resumed, module_folder)


def load_and_save(run: Run, folder: str, target: str) -> None:
    engine = make_engine(run.config, model=partial(Model, 1.0), groups=two_groups)
    engine.load_checkpoint(folder, tag="t")
    engine.save_checkpoint(target, tag="t")
    engine.destroy()


def written(folder: str) -> list[Any]:
    """p, m, v in the files of a checkpoint of stages 1 and 2, by rank and group."""
    files = sorted(Path(folder, "t").glob("*optim_states.pt"))
    states = [
        torch.load(file, map_location="cpu", weights_only=False)["optimizer_state_dict"]
        for file in files
    ]
    return [
        (state["single_partition_of_fp32_groups"], state["base_optimizer_state"]["state"])
        for state in states
    ]


@pytest.mark.parametrize("between", [Run(3, 3, "offload"), Run(3, 1, "predictive")], ids=str)
@pytest.mark.parametrize("setting", ["round_robin_gradients", "parameter_alignment"])
def test_there_and_back(setting: str, between: Run, module_folder: Path, tmp_path: Path) -> None:
    """The files are the same again, to the bit."""
    run = Run(2, 2, "zero", setting)
    folder, _ = saved_by(run, module_folder)
    run_ranks(3, load_and_save, between, folder, str(tmp_path / "there"), pool=between.pool)
    run_ranks(2, load_and_save, run, str(tmp_path / "there"), str(tmp_path / "back"), pool=run.pool)
    assert_same(written(folder), written(str(tmp_path / "back")), "p, m, v")


MID_INTERVAL = STEPS + 1


def applied_at_home(run: Run, folder: str) -> None:
    """Write down what a run of the same layout makes of a checkpoint whose rule it does not
    have."""
    config = run.config
    config["zero_optimization"]["zenflow"] = {"update_rule": "predictive"}
    engine = make_engine(config, model=partial(Model, 1.0), groups=two_groups)
    engine.load_checkpoint(folder, tag="t")
    expected = {"state": state_of(engine), "beside": beside(engine)}
    if dist.get_rank() == 0:
        torch.save(expected, Path(folder, "expected"))
    engine.destroy()


def with_one_count(run: Run, folder: str) -> str:
    """A copy of what a selective run has saved, with what arrives where the rule is another. Cold
    blocks have had fewer updates than hot ones; there all have one count, and moments to match."""
    copied = f"{folder}-applied"
    if not Path(copied).exists():
        shutil.copytree(folder, copied)
        run_ranks(run.ranks, applied_at_home, run, copied, pool=run.pool)
    return copied


@pytest.mark.parametrize(
    ("saved", "resumed"),
    [
        (Run(3, 3, "selective"), Run(2, 1, "predictive")),
        pytest.param(Run(2, 1, "selective"), Run(4, 2, "offload"), marks=pytest.mark.full),
    ],
)
def test_collected_gradients_are_applied(saved: Run, resumed: Run, module_folder: Path) -> None:
    """Saved in the middle of an interval: as where the layout stays and the rule changes, to the
    bit."""
    folder, _ = saved_by(saved, module_folder, MID_INTERVAL)
    before, folder = torch.load(Path(folder, "expected")), with_one_count(saved, folder)
    assert first_difference(before, torch.load(Path(folder, "expected"))), "nothing was collected"
    for difference, _ in run_ranks(
        resumed.ranks, resume, resumed, folder, MID_INTERVAL, pool=resumed.pool
    ):
        assert difference == ""


def load_module_only(run: Run, folder: str) -> str:
    engine = make_engine(run.config, model=partial(Model, 1.0), groups=two_groups)
    engine.load_checkpoint(folder, tag="t", load_module_only=True)
    expected = torch.load(Path(folder, "expected"))
    found = weights_of(engine)
    trained = {
        name: values[0].bfloat16().float()
        for name, values in expected["state"].items()
        if name != "step"
    }
    difference = first_difference(expected["beside"], beside(engine), "beside")
    difference = difference or first_difference(
        trained, {name: found[name] for name in trained}, "weights"
    )
    parameters = dict(engine.module.named_parameters())
    masters = {name: safe_get_full_fp32_param(parameters[name]).float().cpu() for name in trained}
    difference = difference or first_difference(trained, masters, "masters")
    train(engine, data(0, 2))
    engine.destroy()
    return difference


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        (Run(3, 3, "offload"), Run(2, 2, "predictive")),
        (Run(2, 2, "zero"), Run(3, 3, "offload")),
        pytest.param(Run(3, 3, "offload"), Run(2, 3, "zero"), marks=pytest.mark.full),
        pytest.param(Run(3, 3, "offload"), Run(2, 3, "selective"), marks=pytest.mark.full),
    ],
)
def test_only_the_module(saved: Run, loaded: Run, module_folder: Path) -> None:
    """Weights and masters are p rounded to 16 bits, as when DeepSpeed loads a module alone."""
    folder, _ = saved_by(saved, module_folder)
    for difference in run_ranks(loaded.ranks, load_module_only, loaded, folder, pool=loaded.pool):
        assert difference == ""


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("saved", "resumed"),
    [
        # another rule of the same layout begins with p
        *((Run(2, s, "predictive"), Run(2, s, "selective")) for s in (2, 3)),
        (Run(3, 2, "offload", "parameter_alignment"), Run(2, 3, "selective")),
    ],
    ids=lambda run: "-".join(map(str, run)),
)
def test_settings_without_like(saved: Run, resumed: Run, module_folder: Path) -> None:
    test_everything_arrives_to_the_bit(saved, resumed, module_folder)


@pytest.mark.sampled(1)
def test_files_of_older_releases_do_not_name_paddings_of_parameters(
    module_folder: Path, tmp_path: Path
) -> None:
    saved, resumed = Run(2, 2, "predictive"), Run(3, 2, "selective")
    folder = shutil.copytree(saved_by(saved, module_folder)[0], tmp_path / "older")
    for path in Path(folder, "t").glob("*optim_states.pt"):
        content = torch.load(path, weights_only=False)
        del content["optimizer_state_dict"]["param_alignment_paddings"]
        torch.save(content, path)
    for difference, _ in run_ranks(3, resume, resumed, str(folder), pool=resumed.pool):
        assert difference == ""


@pytest.mark.parametrize("way", ["predictive", pytest.param("offload", marks=pytest.mark.full)])
def test_other_sub_groups_are_another_layout(way: str, module_folder: Path) -> None:
    other = Run(2, 3, way, "sub_groups")
    test_everything_arrives_to_the_bit(Run(2, 3, way), other, module_folder)


def refused(run: Run, folder: str, model: Any = None, groups: Any = two_groups, **how: Any) -> str:
    """What an error says. The engine trains on."""
    engine = make_engine(run.config, model=model or partial(Model, 1.0), groups=groups)
    losses = train(engine, data(0, 2))
    message = "loaded"
    try:
        engine.load_checkpoint(folder, tag="t", **how)
    except CheckpointError as error:
        message = str(error)
    losses += train(engine, data(2, 3))
    engine.destroy()
    assert all(map(math.isfinite, losses))
    return message


class Wider(Model):
    """Another model."""

    def __init__(self, value: float) -> None:
        super().__init__(value)
        self.more = torch.nn.Linear(3, 3)


def thawed() -> torch.nn.Module:
    model = Model(1.0)
    model.scale.requires_grad_(True)
    return model


def one_group(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def test_what_does_not_fit_is_refused_by_name_on_all_ranks(
    module_folder: Path, tmp_path: Path
) -> None:
    saved, other = Run(2, 2, "predictive"), Run(3, 3, "predictive")
    folder, _ = saved_by(saved, module_folder)

    def on_all(*args: Any, **how: Any) -> str:
        (message,) = set(run_ranks(other.ranks, refused, other, *args, pool=other.pool, **how))
        return message

    assert "more.weight is not in the checkpoint" in on_all(folder, partial(Wider, 1.0))
    assert "scale is not in the checkpoint" in on_all(folder, thawed)
    assert "2 parameter groups, the optimizer 1" in on_all(folder, groups=one_group)
    assert "custom_load_fn" in on_all(folder, custom_load_fn=print)
    of_lion, _ = saved_by(Run(2, 2, "predictive", "lion"), module_folder)
    assert "of another optimizer" in on_all(of_lion)
    shutil.copytree(Path(folder, "t"), tmp_path / "t")
    file = tmp_path / "t" / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"
    content = file.read_bytes()
    file.unlink()
    assert "was saved by 2 ranks and has the optimizer's files of ranks 0:" in on_all(str(tmp_path))
    file.write_bytes(content[: len(content) // 2])
    assert f"{file} is damaged or incomplete" in on_all(str(tmp_path))
    file.write_bytes(content)
    cut = torch.load(file, map_location="cpu", weights_only=False)
    masters = cut["optimizer_state_dict"]["single_partition_of_fp32_groups"]
    masters[0] = masters[0][:-200].clone()
    torch.save(cut, file)
    assert "by the shapes of the parameters" in on_all(str(tmp_path))


@pytest.mark.parametrize("stage", [2, 3])
def test_another_model_in_the_same_layout_is_refused_too(stage: int, module_folder: Path) -> None:
    run = Run(2, stage, "predictive")
    folder, _ = saved_by(run, module_folder)
    (message,) = set(run_ranks(2, refused, run, folder, partial(Wider, 1.0), pool=run.pool))
    assert "more.weight is not in the checkpoint" in message


def left_to_deepspeed(
    run: Run, folder: str, model: Any = None, **how: Any
) -> tuple[bool, dict[str, torch.Tensor]]:
    """Whether something was loaded, and the weights then."""
    engine = make_engine(run.config, model=model or partial(Model, 1.0), groups=two_groups)
    path, _ = engine.load_checkpoint(folder, tag="t", **how)
    weights = weights_of(engine)
    train(engine, data(0, 2))
    engine.destroy()
    return path is not None, weights


ALONE: list[dict[str, bool]] = [{"load_optimizer_states": False}, {"load_module_only": True}]


@pytest.mark.parametrize(
    ("way", "model", "how", "with_optimizer"),
    [
        ("zero", None, ALONE[0], False),
        ("predictive", None, ALONE[0], False),
        ("predictive", thawed, ALONE[0], True),
        ("predictive", thawed, ALONE[1], True),
    ],
)
def test_weights_alone_are_loaded_as_plain_deepspeed_does_where_both_sides_have_all(
    way: str,
    model: Any,
    how: dict[str, bool],
    with_optimizer: bool,
    module_folder: Path,
    tmp_path: Path,
) -> None:
    """Without the optimizer's files, a warm start; or for another set of trained parameters: a
    fine-tune thaws what was frozen."""
    saved, other = Run(2, 2, way), Run(3, 1, way)
    folder, _ = saved_by(saved, module_folder)
    left_out = () if with_optimizer else ("*optim_states.pt",)
    shutil.copytree(Path(folder, "t"), tmp_path / "t", ignore=shutil.ignore_patterns(*left_out))
    expected = torch.load(
        tmp_path / "t" / "mp_rank_00_model_states.pt", map_location="cpu", weights_only=False
    )["module"]
    for was_loaded, weights in run_ranks(
        3, left_to_deepspeed, other, str(tmp_path), model, pool=other.pool, **how
    ):
        assert was_loaded
        assert_same({name: expected[name].float() for name in weights}, weights, "weights")


# -- a tag that plain ZeRO has written twice -------------------------------------------------------

LATER = STEPS + 2


def saved_one_after_the_other(first: Run, second: Run, folder: Path) -> None:
    for run, steps in ((first, STEPS), (second, LATER)):
        run_ranks(run.ranks, save, run, str(folder), steps, pool=run.pool)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("first", "second", "resumed"),
    [
        (Run(2, 3, "zero"), Run(2, 2, "zero"), Run(2, 2, "zero")),
        (Run(2, 3, "zero"), Run(2, 2, "zero"), Run(3, 3, "zero")),
        (Run(4, 2, "zero"), Run(2, 2, "zero"), Run(1, 2, "zero")),
    ],
    ids=["the same layout", "another stage", "fewer ranks"],
)
def test_the_newer_save_is_loaded(first: Run, second: Run, resumed: Run, tmp_path: Path) -> None:
    saved_one_after_the_other(first, second, tmp_path)
    for difference, _ in run_ranks(
        resumed.ranks, resume, resumed, str(tmp_path), LATER, pool=resumed.pool
    ):
        assert difference == ""


def refusal(run: Run, folder: str) -> str:
    engine = make_engine(run.config, model=partial(Model, 1.0), groups=two_groups)
    try:
        with pytest.raises(CheckpointError) as refused:
            engine.load_checkpoint(folder, tag="t")
    finally:
        engine.destroy()
    return str(refused.value)


def test_optimizer_files_of_two_dtypes_are_refused(tmp_path: Path) -> None:
    """Their names differ, so both saves of a rank are there, and one model's file."""
    first, second = Run(2, 2, "zero"), Run(2, 2, "zero", "fp32")
    saved_one_after_the_other(first, second, tmp_path)
    for message in run_ranks(2, refusal, second, str(tmp_path), pool=second.pool):
        assert "bf16_zero_pp_rank_" in message
        assert "move those of the older save elsewhere" in message
