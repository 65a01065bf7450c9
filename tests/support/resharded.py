"""Saving a model in one layout of ranks and ZeRO stage, loading it in another, and comparing what
has arrived."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

from tests.support.compare import allow_fp16
from tests.support.models import OddModel, two_groups
from tests.support.ranks import run_ranks
from tests.support.same import first_difference
from tests.support.state_access import moments_of
from tests.support.zenflow import (
    RULES,
    make_engine,
    offload_config,
    train,
    weights_of,
    zenflow_config,
)

STEPS = 4
ROWS = 12
"""Sequences in a batch, split over the ranks: the same batch for 1, 2, 3 and 4 ranks."""


ZERO_FIELDS = {
    "round_robin_gradients": True,
    "parameter_alignment": True,
    "load_from_fp32_weights": False,
    "pipeline_loading_checkpoint": True,
}
"""Settings of the section ``zero_optimization``, by name; none is DeepSpeed's default."""


WAITING = RULES["selective"] | {"overlap_step": False}
WAYS = RULES | {"exact": {"update_rule": "exact"}, "waiting": WAITING}
ROUNDED = {"rounded": "bfloat16", "coded": "int8"}
"""Values of `zenflow.state_dtype`, by name of a run's setting."""


class Run(NamedTuple):
    """What may differ between a run and the one that continues it."""

    ranks: int
    stage: int
    way: str
    setting: str = "bf16"

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights."""
        return {"fp16": torch.float16, "fp32": torch.float32}.get(self.setting, torch.bfloat16)

    @property
    def config(self) -> dict[str, Any]:
        config = zenflow_config(self.stage, self.dtype, **WAYS.get(self.way, {}))
        if self.way not in WAYS:
            config = offload_config(config)
            if self.way == "zero":
                del config["zero_optimization"]["offload_optimizer"]
        if self.setting == "uncorrected":  # whose first updates are several times as large
            params = {"lr": 3e-4, "weight_decay": 0.1, "bias_correction": False}
            config["optimizer"]["params"] = params
        if self.setting == "lion":
            config["optimizer"] = {"type": "Lion", "params": {"lr": 1e-4, "weight_decay": 0.1}}
        if self.setting in ROUNDED and "zenflow" in config["zero_optimization"]:
            config["zero_optimization"]["zenflow"]["state_dtype"] = ROUNDED[self.setting]
        if self.setting == "fp32_sums":
            config["data_types"] = {"grad_accum_dtype": "fp32"}
        if self.setting == "sub_groups":
            config["zero_optimization"]["sub_group_size"] = 1000
        if self.setting in ZERO_FIELDS:
            config["zero_optimization"][self.setting] = ZERO_FIELDS[self.setting]
        return config

    @property
    def pool(self) -> str:
        """Stage 3 changes its process for good."""
        return f"resharding {self.stage == 3}"


class Model(OddModel):
    """With frozen parameters, one of them not in the order of its rows, and a buffer, all made from
    `value`."""

    def __init__(self, value: float) -> None:
        super().__init__(awkward=True)
        del self.empty  # plain ZeRO-3 fails in its forward pass
        self.scale.data.uniform_(0.5 * value, value)
        kernel = torch.empty(8, 25, 3).uniform_(0.5 * value, value)
        # elsewhere DeepSpeed's broadcast at the start refuses it
        if get_accelerator().device_name() == "cpu":
            kernel = kernel.transpose(0, 1)
        self.kernel = torch.nn.Parameter(kernel, requires_grad=False)
        self.register_buffer("seen", torch.full((3,), value))


def data(first: int, last: int) -> list[torch.Tensor]:
    """This rank's part of the batches."""
    generator = torch.Generator().manual_seed(5)
    whole = [torch.randint(0, 64, (ROWS, 16), generator=generator) for _ in range(last)][first:]
    rows = ROWS // dist.get_world_size()
    return [batch[rows * dist.get_rank() :][:rows] for batch in whole]


def everyones(losses: list[float]) -> list[float]:
    """The mean over the ranks."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, losses)
    return [sum(each) / len(each) for each in zip(*found, strict=True)]


def state_of(engine: Any) -> dict[str, Any]:
    """p, m, v by name of the parameter, and the step count."""
    found: dict[str, Any] = {}
    if engine.zero_optimization_stage() < 3:  # a save and a load of plain ZeRO cut these links
        engine.optimizer._hp_optimizer_states_linked = False
        engine.optimizer._lazy_init_hp_params_optimizer_state()
    for name, parameter in engine.module.named_parameters():
        if parameter.requires_grad:
            states = [safe_get_full_optimizer_state(parameter, key) for key in moments_of(engine)]
            found[name] = [
                each.float().cpu().clone()
                for each in (safe_get_full_fp32_param(parameter), *states)
            ]
    steps = {int(state["step"]) for state in engine.optimizer.optimizer.state.values()}
    return {**found, "step": sorted(steps)}


def beside(engine: Any) -> dict[str, torch.Tensor]:
    weights = weights_of(engine)
    return {
        "scale": weights["scale"],
        "kernel": weights["kernel"],
        "seen": engine.module.seen.cpu(),
    }


def save(run: Run, folder: str, steps: int = STEPS) -> list[float]:
    """Train and save; returns the losses of the steps that follow."""
    allow_fp16()
    engine = make_engine(run.config, model=partial(Model, 2.0), groups=two_groups)
    train(engine, data(0, steps))
    engine.save_checkpoint(folder, tag="t", client_state={"mine": torch.Size((7,))})
    expected = {"state": state_of(engine), "beside": beside(engine)}
    if dist.get_rank() == 0:
        torch.save(expected, Path(folder, "expected"))
    losses = everyones(train(engine, data(steps, steps + 3)))
    engine.destroy()
    return losses


def resume(
    run: Run, folder: str, steps: int = STEPS, *, goes_on: bool = False
) -> tuple[str, list[float]]:
    """Load; returns how what has arrived differs, and the losses of the steps that follow. A run
    that `goes_on` as if it had not ended has the saved weights, which may be predictions."""
    allow_fp16()
    engine = make_engine(run.config, model=partial(Model, 1.0), groups=two_groups)
    path, client_state = engine.load_checkpoint(folder, tag="t")
    assert path is not None
    assert client_state["mine"].numel() == 7
    assert engine.global_steps == steps
    expected = torch.load(Path(folder, "expected"))
    difference = first_difference(
        expected, {"state": state_of(engine), "beside": beside(engine)}, "arrived"
    )
    exact = {
        name: values[0].to(run.dtype).float()
        for name, values in expected["state"].items()
        if name != "step"
    }
    weights = {name: weight for name, weight in weights_of(engine).items() if name in exact}
    difference = difference or (first_difference(exact, weights, "weights") if not goes_on else "")
    losses = everyones(train(engine, data(steps, steps + 3)))
    engine.destroy()
    return difference, losses


def saved_by(run: Run, folder: Path, steps: int = STEPS) -> tuple[str, list[float]]:
    """The folder of what `run` saved, once for all tests, and the losses that follow."""
    own = folder / f"{'-'.join(map(str, run))}-{steps}"
    if not own.exists():
        own.mkdir()
        losses = run_ranks(run.ranks, save, run, str(own), steps, pool=run.pool)[0]
        torch.save(losses, own / "losses")
    return str(own), torch.load(own / "losses")
