"""One altered node in a checkpoint's file: an error of ours on every rank that names the
checkpoint, and the state before is whole; or the run goes on to the bit, or as a user may want."""

from __future__ import annotations

import copy
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed import comm as dist

from deepspeed_ext.adapter.saved_fields import require_weights
from deepspeed_ext.errors import CheckpointError
from tests.support.altered import Alteration, alter, alterations
from tests.support.models import OddModel, batches, two_groups
from tests.support.ranks import run_ranks
from tests.support.same import first_difference
from tests.support.zenflow import RULES, make_engine, masters_of, train, weights_of, zenflow_config

pytestmark = pytest.mark.sampled(4)

STEPS, GOOD = 8, 5
MINE = (
    "param_groups",
    "loss_scaler",
    "collected",
    "last",
    "plan",
    "lr_scheduler",
    "global_",
    "skipped_steps",
)
"""Parts of a path: numbers that are a user's to change, or as good as any other."""
AS_OFFLOAD = ("deepspeed_ext_zenflow", "group_paddings", "param_shapes", "partition_count")
"""If one of these is missing or another, the checkpoint is one of plain ZeRO-Offload or of another
layout, which arrives without ZenFlow's schedule."""


def model() -> OddModel:
    """With a frozen parameter."""
    made = OddModel(17, awkward=True)
    del made.empty  # which stage 3 cannot have in a group of its own
    return made


def state_of(engine: Any) -> dict[str, Any]:
    optimizer = engine.optimizer
    schedule = engine.lr_scheduler
    return {
        "counts": (engine.global_steps, engine.global_samples, engine.skipped_steps),
        "masters": masters_of(engine),
        "groups": [
            {**group, "params": None} for group in copy.copy(optimizer.optimizer.param_groups)
        ],
        "moments": [copy.deepcopy(each) for each in optimizer.optimizer.state.values()],
        "scale": vars(optimizer.loss_scaler).copy(),
        "schedule": None if schedule is None else copy.deepcopy(schedule.state_dict()),
        "rng": torch.get_rng_state(),
        "weights": weights_of(engine),
    }


def gathered(value: Any) -> list[Any]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def told_by(action: Callable[[], Any]) -> str:
    try:
        action()
    except Exception as error:
        ours = "" if isinstance(error, CheckpointError) else f"a {type(error).__name__}: "
        return f"{ours}{error}"
    return ""


class Trial:
    """A run that loads altered copies of its own checkpoint."""

    def __init__(self, saving: dict[str, Any], folder: str) -> None:
        self.engine = make_engine(saving, model=model, groups=two_groups)
        self.data = batches(STEPS, dist.get_rank())
        self.folder = Path(folder)
        train(self.engine, self.data[:GOOD])
        self.engine.save_checkpoint(folder, tag="good", client_state={"mine": {"a": [1, 2]}})
        self.load("good")
        self.expected = self.trained_on()

    def load(self, tag: str) -> None:
        self.engine.load_checkpoint(str(self.folder), tag=tag)

    def trained_on(self) -> Any:
        return train(self.engine, self.data[GOOD:]), state_of(self.engine)

    def drawn(self, rng: random.Random, count: int) -> list[Alteration]:
        every = [
            change
            for path in sorted(Path(self.folder, "good").glob("*states.pt"))
            for change in alterations(path.name, torch.load(path, weights_only=False))
        ]
        return rng.sample(every, min(count, len(every)))

    def problem(self, change: Alteration) -> str:
        """What is wrong with a load of this; empty: nothing."""
        self.load("good")
        bad = self.folder / "bad"
        if dist.get_rank() == 0:
            shutil.copytree(self.folder / "good", bad)
            alter(bad, change)
        dist.barrier()
        told = gathered(told_by(lambda: self.load("bad")))
        if dist.get_rank() == 0:
            shutil.rmtree(bad)
        if len(set(told)) > 1:
            return f"the ranks differ: {told}"
        if told[0].startswith("a ") or (told[0] and str(bad) not in told[0]):
            return told[0]
        if not told[0] and any(part in str(change) for part in (*MINE, *AS_OFFLOAD)):
            return ""
        differences = gathered(first_difference(self.expected, self.trained_on(), "run"))
        return next((f"{told[0]}; then {each}" for each in differences if each), "")


def problems(config: dict[str, Any], folder: str, seed: int, count: int) -> list[str]:
    trial = Trial(config, folder)
    found = [
        f"{change}: {problem}"
        for change in trial.drawn(random.Random(seed), count)
        if (problem := trial.problem(change))
    ]
    trial.engine.destroy()
    return found


def config_of(kind: str, stage: int) -> dict[str, Any]:
    config = zenflow_config(stage, **RULES.get(kind, RULES["predictive"]))
    zenflow = config["zero_optimization"]["zenflow"]
    if kind == "exact":
        config["zero_optimization"]["zenflow"] = {"update_rule": "exact"}
    elif kind == "lion":
        config["optimizer"] = {"type": "Lion", "params": {"lr": 1e-4, "weight_decay": 0.1}}
        config["zero_optimization"]["zenflow"] = {"update_interval": 1, "full_warm_up_rounds": 1}
    elif kind == "int8":
        zenflow["state_dtype"] = "int8"
    elif kind == "share":
        config["zero_optimization"]["offload_optimizer"] = {"device": "cpu", "ratio": 0.5}
    config["scheduler"] = {"type": "WarmupLR", "params": {"warmup_num_steps": 20}}
    return config


@pytest.mark.parametrize("kind", ["predictive", "selective", "exact", "lion", "int8", "share"])
@pytest.mark.parametrize(("ranks", "stage"), [(1, 1), (2, 2), (2, 3)])
def test_an_altered_file_is_refused_before_anything_changes_or_changes_nothing(
    kind: str, ranks: int, stage: int, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    count = 300 if request.config.getoption("--full") else 10
    device = "sim" if kind == "share" else "cpu"
    how = {"device": device, "timeout_seconds": 900.0}
    found = run_ranks(ranks, problems, config_of(kind, stage), str(tmp_path), stage, count, **how)
    assert found == [[]] * ranks


FOUND: dict[str, tuple[str, tuple[Any, ...], str]] = {
    "no optimizer": ("*optim_states.pt", ("optimizer_state_dict",), "missing"),
    "padding": (
        "*optim_states.pt",
        ("optimizer_state_dict", "param_alignment_paddings", 0, 0),
        "negative",
    ),
    "ranks": ("*optim_states.pt", ("optimizer_state_dict", "partition_count", 0), "huge"),
    "p": (
        "*optim_states.pt",
        ("optimizer_state_dict", "single_partition_of_fp32_groups", 0),
        "shorter",
    ),
    "a moment": (
        "*optim_states.pt",
        ("optimizer_state_dict", "base_optimizer_state", "state", 0, "exp_avg_sq"),
        "missing",
    ),
    "a count": (
        "*optim_states.pt",
        ("optimizer_state_dict", "base_optimizer_state", "state", 0, "step"),
        "NaN",
    ),
    "numbers of parameters": (
        "*optim_states.pt",
        ("optimizer_state_dict", "base_optimizer_state", "param_groups", 0, "params", 0),
        "huge",
    ),
    "a weight": ("mp_rank_00_model_states.pt", ("module", "up.bias"), "longer"),
    "dtype of a weight": ("mp_rank_00_model_states.pt", ("module", "up.bias"), "int64"),
    "no weight": ("mp_rank_00_model_states.pt", ("module", "up.bias"), "missing"),
    "the save": ("mp_rank_00_model_states.pt", ("deepspeed_ext_save_id",), "missing"),
}
"""Files, path and change of what once was found after something had changed, or never."""


def what_is_said(config: dict[str, Any], folder: str, names: list[str]) -> list[str]:
    trial, found = Trial(config, folder), []
    for name in names:
        files, path, what = FOUND[name]
        file = min(Path(folder, "good").glob(files)).name
        if problem := trial.problem(Alteration(file, path, what)):
            found.append(f"{name}: {problem}")
    trial.engine.destroy()
    return found


@pytest.mark.sampled(1)
def test_what_was_found_too_late_is_refused_with_the_state_before(tmp_path: Path) -> None:
    config = config_of("predictive", 2)
    assert run_ranks(2, what_is_said, config, str(tmp_path), [*FOUND]) == [[]] * 2


def rewritten(folder: Path, change: Callable[[dict[str, Any]], None], **how: Any) -> None:
    for path in folder.glob("*states.pt"):
        content = torch.load(path, weights_only=False)
        change(content)
        torch.save(content, path, **how)


def as_older_releases(content: dict[str, Any]) -> None:
    """Leave out what 0.19.0 does not save, and what nothing needs."""
    for key in ("ds_config", "shared_params", "global_samples", "buffer_names"):
        content.pop(key, None)
    state = content.get("optimizer_state_dict", {})
    state.pop("param_alignment_paddings", None)
    for entry in state.get("base_optimizer_state", {}).get("state", {}).values():
        entry["step"] = int(entry["step"])


def with_other_names(content: dict[str, Any]) -> None:
    if "module" in content:
        content["module"]["down.mine"] = content["module"].pop("down.weight")


def renamed(state: dict[str, Any], prefix: str, *args: Any) -> None:
    if "down.mine" in state:
        state["down.weight"] = state.pop("down.mine")


def still_loaded(config: dict[str, Any], folder: str) -> list[str]:
    trial, found = Trial(config, folder), []
    good = Path(folder, "good")
    ways: list[tuple[str, Callable[[dict[str, Any]], None], dict[str, Any]]] = [
        ("torch's older format", lambda content: None, {"_use_new_zipfile_serialization": False}),
        ("older releases", as_older_releases, {}),
        ("other names, by a hook", with_other_names, {}),
    ]
    for name, change, how in ways:
        shutil.copytree(good, Path(folder, "other"))
        rewritten(Path(folder, "other"), change, **how)
        hooks = []
        if "hook" in name:
            hooks.append(
                trial.engine.module.register_load_state_dict_pre_hook(
                    lambda module, *args: renamed(*args)
                )
            )
        told = told_by(lambda: trial.load("other"))
        found += [f"{name}: {told}"] if told else []
        counts = trial.engine.global_samples
        if difference := first_difference(trial.expected, trial.trained_on(), "run"):
            found.append(f"{name}, from {counts}: {difference}")
        for hook in hooks:
            hook.remove()
        shutil.rmtree(Path(folder, "other"))
    shutil.copytree(good, Path(folder, "other"))
    rewritten(Path(folder, "other"), with_other_names)
    told = told_by(
        lambda: trial.engine.load_checkpoint(folder, tag="other", load_module_strict=False)
    )
    found += [f"not strict: {told}"] if told else []
    found += without_frozen(trial)
    trial.engine.destroy()
    return found


def without_frozen(trial: Trial) -> list[str]:
    """As the Trainer saves and loads a model of PEFT."""
    trial.load("good")
    folder = str(trial.folder)
    trial.engine.save_checkpoint(folder, tag="thin", exclude_frozen_parameters=True)
    trial.trained_on()
    told = told_by(
        lambda: trial.engine.load_checkpoint(folder, tag="thin", load_module_strict=False)
    )
    difference = first_difference(trial.expected, trial.trained_on(), "run")
    return [f"without frozen parameters: {each}" for each in (told, difference) if each]


@pytest.mark.parametrize("stage", [2, 3])
def test_what_older_releases_and_users_write_still_loads(stage: int, tmp_path: Path) -> None:
    assert run_ranks(1, still_loaded, config_of("predictive", stage), str(tmp_path)) == [[]]


def without_bias(module: torch.nn.Module, keys: Any) -> None:
    keys.missing_keys.clear()


def with_load_of_its_own(module: Any) -> None:
    module.load_state_dict = lambda state, strict=True: None


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "prepare",
    [
        lambda module: module.register_load_state_dict_post_hook(without_bias),
        with_load_of_its_own,
    ],
)
def test_a_weight_may_be_missing_where_others_than_torch_say_so(
    prepare: Callable[[Any], object],
) -> None:
    module = torch.nn.Linear(2, 2)
    saved = {"module": {"weight": torch.ones(2, 2)}}
    with pytest.raises(CheckpointError, match="missing in the checkpoint"):
        require_weights("file", saved, module, strict=True)
    prepare(module)
    require_weights("file", saved, module, strict=True)
    module.load_state_dict(saved["module"])


def test_a_mask_may_change_its_kind_and_a_weight_may_not() -> None:
    """Models saved masks as numbers, and have truths today."""
    module = torch.nn.Linear(2, 2, bias=False)
    module.register_buffer("mask", torch.ones(2, dtype=torch.bool))
    saved = {"weight": torch.ones(2, 2), "mask": torch.ones(2)}
    require_weights("file", {"module": saved}, module, strict=True)
    saved["weight"] = saved["weight"].long()
    with pytest.raises(CheckpointError, match="weight is a"):
        require_weights("file", {"module": saved}, module, strict=True)
