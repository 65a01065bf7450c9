"""Ways to train, by name, and bodies of ranks that compare runs of them to the bit."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_set_full_grad,
)

import deepspeed_ext
from tests.support.compare import allow_fp16
from tests.support.experts import ExpertModel, expert_groups, replicas_differ
from tests.support.models import Branches, OddModel, batches, on_device, two_groups
from tests.support.ranks import run_ranks
from tests.support.same import first_difference
from tests.support.state_access import scale_state, state_of
from tests.support.zenflow import (
    RULES,
    full_masters_of,
    make_engine,
    masters_of,
    small_chunks,
    train,
    weights_of,
    zenflow_config,
)
from tests.support.zero3 import with_leaves

STEPS, MIDDLE = 8, 5
"""Optimizer steps of a run, and those after which a checkpoint is written."""
SECONDS = 280
"""For which a run may last."""
OVERFLOWS = (1, 5)
"""Steps that fp16 skips."""
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "AdamW": {"lr": 1e-2, "weight_decay": 0.1, "torch_adam": True},
    "Adam": {"lr": 1e-3, "weight_decay": 0.1, "bias_correction": False, "adam_w_mode": False},
    "Lion": {"lr": 1e-3, "betas": [0.9, 0.99], "weight_decay": 0.1},
}


class WithFrozen(OddModel):
    """One parameter is tied, one frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(37), requires_grad=False)


@dataclass(frozen=True)
class Variant:
    """A way to train.

    Attributes:
        section: fields of the ``zenflow`` section.
        zero: further fields of ``zero_optimization``.
        like: fields of a run with the same bits: of the section, and of ``zero_optimization``
            (``None`` takes one out). None: there is no such run.
        stages, ranks, dtypes, accumulations, clippings: with which it is tried.
        device: "cpu" or "sim", the simulated accelerator.
        model, groups: what makes the model and its parameter groups.
    """

    section: dict[str, Any] = field(default_factory=dict)
    zero: dict[str, Any] = field(default_factory=dict)
    like: dict[str, Any] | None = None
    stages: tuple[int, ...] = (2, 3)
    ranks: tuple[int, ...] = (1, 2)
    dtypes: tuple[str, ...] = ("bf16", "fp32")
    accumulations: tuple[int, ...] = (1, 3)
    clippings: tuple[float, ...] = (0.0, 0.5)
    device: str = "cpu"
    optimizer: str = "AdamW"
    model: Callable[[], Any] = WithFrozen
    groups: Callable[[Any], Any] = two_groups

    def config(self, stage: int, dtype: str, accumulation: int, clipping: float) -> dict[str, Any]:
        """The config of a run."""
        config = zenflow_config(stage, DTYPES[dtype], accumulation, **self.section)
        config["optimizer"] = {"type": self.optimizer, "params": OPTIMIZERS[self.optimizer]}
        config["gradient_clipping"] = clipping
        config["fp16"] |= {"initial_scale_power": 8, "hysteresis": 1, "loss_scale_window": 3}
        if stage == 3:  # several sub-groups
            config["zero_optimization"]["sub_group_size"] = 2000
        config["zero_optimization"] |= self.zero
        if dtype == "bf16" and self.like in (STAY, PARAMS_STAY):  # sums that stay are rounded to it
            config["data_types"] = {"grad_accum_dtype": "bf16"}
        return config

    def other(self, config: dict[str, Any]) -> dict[str, Any]:
        """The config of the run with the same bits."""
        config = copy.deepcopy(config)
        zero = config["zero_optimization"]
        for name, value in (self.like or {}).items():
            of = zero if name in self.zero or name.startswith("offload_") else zero["zenflow"]
            of.pop(name, None)
            of |= {} if value is None else {name: value}
        return config


ON_HOST, STAY = {"gradients_on_host": True}, {"gradients_on_host": False}
HIDDEN, IN_STEP = {"hide_transfers": True}, {"hide_transfers": False}
WAITS = {"update_rule": "predictive", "overlap_step": False}
"""What the exact rule is like: a step waits for its own update."""
PARAMS_ON_HOST = {
    name: {"device": "cpu", "pin_memory": True} for name in ("offload_param", "offload_optimizer")
}
PARAMS_STAY = dict.fromkeys(PARAMS_ON_HOST)
SHARE = {"offload_optimizer": {"device": "cpu", "ratio": 0.4}}


def _on_host(**section: Any) -> Variant:
    """Gradients that leave the accelerator in backward."""
    rule = "selective" if "topk_ratio" in section else "predictive"
    section = {"update_rule": rule} | section | ON_HOST
    return Variant(section, like=STAY, device="sim")


def _exact(*, device: str = "sim", zero: dict[str, Any] | None = None, **section: Any) -> Variant:
    stages = (3,) if zero and any(name.startswith("stage3") for name in zero) else (1, 2, 3)
    section = {"update_rule": "exact"} | section
    return Variant(section, zero or {}, WAITS, stages, device=device)


def _varied(variant: Variant, **changes: Any) -> Variant:
    return Variant(**{**vars(variant), **changes})


VARIANTS: dict[str, Variant] = {
    "predictive": Variant(RULES["predictive"], stages=(1, 2, 3)),
    "predictive, Adam without correction": Variant(RULES["predictive"], optimizer="Adam"),
    "predictive, bf16 moments": Variant({"state_dtype": "bfloat16"}, stages=(1, 2, 3)),
    "predictive, 8-bit moments": Variant({"state_dtype": "int8"}, stages=(1, 2, 3)),
    "predictive, Lion": Variant(RULES["predictive"], stages=(1, 2, 3), optimizer="Lion"),
    "predictive, share": Variant(RULES["predictive"], SHARE, stages=(1, 2, 3)),
    "predictive, share, 8-bit moments": Variant({"state_dtype": "int8"}, SHARE),
    "predictive, async save": Variant({"async_save": True}),
    "selective": Variant(RULES["selective"], stages=(1, 2, 3)),
    "selective, without overlap": Variant(
        RULES["selective"] | {"overlap_step": False}, stages=(1, 2, 3)
    ),
    "selective, share": Variant(RULES["selective"], SHARE),
    **{
        f"{name}, experts": Variant(
            section,
            stages=(1, 2),
            ranks=(2, 4),
            optimizer="Lion" if name == "Lion" else "AdamW",
            model=partial(ExpertModel, 2, 4),
            groups=expert_groups,
        )
        for name, section in (RULES | {"Lion": RULES["predictive"]}).items()
    },
    **{
        f"predictive, {tier} tier": Variant(
            {}, {"flatten_tier": tier}, {"flatten_tier": None}, (1, 2), ranks=(2,)
        )
        for tier in ("accelerator", "distributed", "host")
    },
    "predictive, leaf modules": Variant(RULES["predictive"], stages=(3,), model=with_leaves),
    "selective, leaf modules": Variant(RULES["selective"], stages=(3,), model=with_leaves),
    "hidden copies": Variant(HIDDEN, like=IN_STEP, stages=(1, 2, 3), device="sim"),
    "hidden copies, bf16 moments": Variant(
        HIDDEN | {"state_dtype": "bfloat16"}, like=IN_STEP, device="sim"
    ),
    "hidden copies, 8-bit moments": Variant(
        HIDDEN | {"state_dtype": "int8"}, like=IN_STEP, device="sim"
    ),
    "hidden copies, Lion": Variant(HIDDEN, like=IN_STEP, device="sim", optimizer="Lion"),
    "hidden copies, selective": Variant(RULES["selective"] | HIDDEN, like=IN_STEP, device="sim"),
    "gradients on the host": _varied(_on_host(), ranks=(1, 2, 3), accumulations=(1, 4)),
    "gradients on the host, CPU": _varied(_on_host(), device="cpu"),
    "gradients on the host, fp16": _varied(_on_host(), dtypes=("fp16",)),
    "gradients on the host, without overlap": _on_host(overlap_step=False),
    "gradients on the host, selective": _on_host(**RULES["selective"]),
    "gradients on the host, Lion": _varied(_on_host(), optimizer="Lion"),
    "gradients on the host, overlap_comm": _varied(
        _on_host(), stages=(2,), zero={"overlap_comm": True}
    ),
    "gradients on the host, small buckets": _varied(
        _on_host(), stages=(2,), zero={"reduce_bucket_size": 500}
    ),
    "gradients on the host, round robin": _varied(
        _on_host(), stages=(2,), zero={"round_robin_gradients": True}
    ),
    "gradients on the host, unused parameters": _varied(
        _on_host(), model=Branches, zero={"ignore_unused_parameters": True}
    ),
    "gradients on the host, experts": _varied(
        _on_host(), stages=(2,), ranks=(2,), model=partial(ExpertModel, 2), groups=expert_groups
    ),
    # Norms are ZeRO-Offload's there, whose sum over parameters is rounded to fp32: no clipping.
    **{
        f"weights on the host, {name}": Variant(
            section, PARAMS_ON_HOST, PARAMS_STAY, (3,), clippings=(0.0,), optimizer=optimizer
        )
        for name, section, optimizer in (
            ("predictive", {}, "AdamW"),
            ("bf16 moments", {"state_dtype": "bfloat16"}, "AdamW"),
            ("8-bit moments", {"state_dtype": "int8"}, "AdamW"),
            ("selective", RULES["selective"], "AdamW"),
            ("Lion", {}, "Lion"),
        )
    },
    "weights on the host of a device": Variant(
        {}, PARAMS_ON_HOST, PARAMS_STAY, (3,), clippings=(0.0,), device="sim"
    ),
    "exact, CPU": _exact(device="cpu"),
    "exact": _exact(),
    "exact, fp16": _varied(_exact(), dtypes=("fp16",)),
    "exact, bf16 moments": _exact(state_dtype="bfloat16"),
    "exact, 8-bit moments": _exact(state_dtype="int8"),
    "exact, Lion": _varied(_exact(), optimizer="Lion"),
    "exact, unused parameters": _varied(_exact(), model=Branches),
    "exact, copies in the step": _exact(hide_transfers=False),
    "exact, gradients on the host": _varied(_exact(**ON_HOST), stages=(2, 3), ranks=(1, 2, 3)),
    "exact, gradients on the host, round robin": _varied(
        _exact(**ON_HOST), stages=(2,), zero={"round_robin_gradients": True}
    ),
    "exact, weights on the host": _varied(
        _exact(zero={"offload_param": {"device": "cpu"}}), stages=(3,)
    ),
    "exact, share": _varied(_exact(zero=SHARE), ranks=(2, 3)),
    "exact, share, overlap_comm": _varied(_exact(zero=SHARE | {"overlap_comm": True}), stages=(2,)),
    "exact, single-parameter gather": _exact(zero={"stage3_allgather_single_param": True}),
    "exact, no prefetch": _exact(zero={"stage3_prefetch_bucket_size": 0}),
    "exact, all persistent": _exact(zero={"stage3_param_persistence_threshold": 10**6}),
    "exact, secondary partitions": _varied(
        _exact(zero={"zero_hpz_partition_size": 2}), stages=(3,), ranks=(2,)
    ),
}


def engine_of(config: dict[str, Any], variant: Variant) -> Any:
    """An engine around the variant's model."""
    if config["fp16"]["enabled"]:
        allow_fp16()
    engine = make_engine(config, model=variant.model, groups=variant.groups)
    asked = config["zero_optimization"]["zenflow"].get("gradients_on_host")
    if asked is not None:
        goes = engine.optimizer._host_gradients is not None
        assert goes is (asked and not get_accelerator().is_synchronized_device())
    return engine


def state_at_end(engine: Any, variant: Variant) -> dict[str, Any]:
    """Weights, p, norm and skipped steps. p without padding, which no checkpoint has."""
    norm, optimizer = engine.get_global_grad_norm(), engine.optimizer
    if variant.groups is expert_groups:
        lengths = zip(masters_of(engine), optimizer.groups_padding, strict=True)
        masters = [master[: master.numel() - padding] for master, padding in lengths]
    else:
        masters = full_masters_of(engine)
    return {
        "norm": None if norm is None else float(norm),
        "skipped": engine.skipped_steps,
        "weights": weights_of(engine),
        "masters": masters,
    }


# -- what may come between steps -------------------------------------------------------------------


def _look(engine: Any, folder: str, number: int) -> None:
    """Inside `exact_weights` the model has p, rounded."""
    with engine.optimizer.exact_weights():
        found = weights_of(engine)
        p = {
            name: safe_get_full_fp32_param(param).to(param.dtype).float().cpu()
            for name, param in engine.module.named_parameters()
            if param.requires_grad
        }
    difference = first_difference(p, {name: found[name] for name in p}, f"exact, step {number}")
    assert not difference, difference


def _read(engine: Any, folder: str, number: int) -> None:
    """By turns of two steps, read the state and write it back."""
    state = state_of(engine)
    if number % 4 >= 2:
        scale_state(engine, 1.0)
    difference = first_difference(state, state_of(engine), f"state after step {number}")
    assert not difference, difference


def _sleep(engine: Any, folder: str, number: int) -> None:
    engine.offload_states(pin_memory=number % 2 == 0)
    engine.reload_states()


def _save(engine: Any, folder: str, number: int) -> None:
    engine.save_checkpoint(folder, tag=str(number))


def _load(engine: Any, folder: str, number: int) -> None:
    _save(engine, folder, number)
    engine.load_checkpoint(folder, tag=str(number))


def _evaluate(engine: Any, folder: str, number: int) -> None:
    engine.module.eval()
    with torch.no_grad():
        engine(on_device(batches(1, 77)[0]))
    engine.module.train()


def _stream(engine: Any, folder: str, number: int) -> None:
    for _ in deepspeed_ext.weights(engine):
        pass


EVENTS: dict[str, Callable[[Any, str, int], None]] = {
    "exact weights": _look,
    "reads and writes": _read,
    "sleep": _sleep,
    "save": _save,
    "load": _load,
    "new engine": _load,
    "evaluation": _evaluate,
    "stream of weights": _stream,
    "drain": lambda engine, folder, number: engine.optimizer.host_optimizer.state.drain(),
    "read gradients": lambda engine, folder, number: None,
}
"""Before a step: of which engine, a folder, its number. "read gradients" is in backward, and "new
engine" changes the engine as well."""
ANYWHERE = {"sleep", "evaluation", "drain", "exact weights"}
"""Events that may also come between the micro-steps of a step."""


# -- runs ------------------------------------------------------------------------------------------


def trained(
    config: dict[str, Any],
    variant: Variant,
    events: tuple[str, ...] = (),
    folder: str = "",
    *,
    saves: Collection[int] = (),
    loads: int = 0,
) -> dict[str, Any]:
    """Train, with an event that is drawn before each step; losses and the state at the end.

    Args:
        saves: after which steps a checkpoint is written into `folder`.
        loads: of which of them the run begins; of an odd one in an engine that has been used.
    """
    passes, drawn, losses = config["gradient_accumulation_steps"], random.Random(7), []
    data = [on_device(batch) for batch in batches(STEPS * passes, dist.get_rank())]
    with small_chunks():
        engine = engine_of(config, variant)
        is_hidden = config["zero_optimization"]["zenflow"].get("hide_transfers")
        if is_hidden and not get_accelerator().is_synchronized_device():
            assert engine.optimizer.host_optimizer.decided.is_in_transit, "few places, many chunks"
        if loads % 2:
            train(engine, batches(2 * passes, 77))
        if loads:
            engine.load_checkpoint(folder, tag=str(loads))
        for number in range(loads * passes, STEPS * passes):
            event = drawn.choice(events) if events else ""
            if event in ANYWHERE or (event and number % passes == 0):
                EVENTS[event](engine, folder, number)
            if event == "new engine" and number % passes == 0:
                engine.destroy()
                engine = engine_of(config, variant)
                engine.load_checkpoint(folder, tag=str(number))
            loss = engine(data[number])
            skips = config["fp16"]["enabled"] and number // passes in OVERFLOWS
            engine.backward(loss * float("inf") if skips else loss)
            if "read gradients" in events and engine.is_gradient_accumulation_boundary():
                [safe_get_full_grad(param) for param in engine.module.parameters()]
            engine.step()
            losses.append(loss.detach())
            steps, left = divmod(number + 1, passes)
            if not left and steps in saves:
                engine.save_checkpoint(folder, tag=str(steps))
        found = {"losses": [loss.item() for loss in losses], **state_at_end(engine, variant)}
        if variant.groups is expert_groups:
            assert not replicas_differ(engine)
        engine.destroy()
    assert len(set(found["losses"])) > 2, "it does not train"
    return found


def differs(config: dict[str, Any], other: dict[str, Any], variant: Variant) -> str:
    """How two runs differ. With weights on the host the norm is ZeRO-Offload's, whose sum over
    parameters is rounded."""
    runs = [trained(each, variant) for each in (other, config)]
    if "offload_param" in variant.zero:
        for each in runs:
            del each["norm"]
    return first_difference(runs[0], runs[1], "run")


def disturbed(
    config: dict[str, Any], variant: Variant, events: tuple[str, ...], folder: str, seed: int
) -> str:
    """How a run with events between its steps differs from one without. A simulated accelerator
    draws the order of its work."""
    if variant.device == "sim":
        from tests.support.simulated_accelerator import simulation

        simulation.configure("seeded", seed)
    try:
        return first_difference(
            trained(config, variant), trained(config, variant, events, folder), str(events)
        )
    finally:
        if variant.device == "sim":
            simulation.configure("held")


def saved(config: dict[str, Any], variant: Variant, folder: str, at: Collection[int]) -> str:
    """Train, save after some steps, and write what comes out: how that differs from training
    alone."""
    found = trained(config, variant, (), folder, saves=at)
    torch.save(found, Path(folder, f"expected-{dist.get_rank()}.pt"))
    return first_difference(trained(config, variant), found, "saving")


def resumed(
    config: dict[str, Any], variant: Variant, folder: str, at: Collection[int], is_other: bool
) -> str:
    """How runs from each of these steps differ from the uninterrupted one, perhaps one with an
    `other` config; norms as in `differs`."""
    expected = torch.load(Path(folder, f"expected-{dist.get_rank()}.pt"), weights_only=False)
    differences = []
    for step in at:
        found = trained(config, variant, (), folder, loads=step)
        if is_other and "offload_param" in variant.zero:
            expected["norm"] = found["norm"]
        wanted = {**expected, "losses": expected["losses"][-len(found["losses"]) :]}
        differences.append(first_difference(wanted, found, f"resumed at {step}"))
    return "".join(differences)


def failed_resumes(
    ranks: int,
    variant: Variant,
    saves: dict[str, Any],
    folder: str,
    loads: dict[str, Any] | None = None,
    at: Collection[int] = (MIDDLE,),
    device: str = "",
) -> list[str]:
    """Train and save with one config, and resume with the same or another; what differs on any
    rank, to the bit.

    Each in processes of its own, which run the same settings in the same order and nothing else:
    DeepSpeed's stage 3 leaves another ``torch.nn.functional.linear`` behind in its process, which
    rounds differently."""
    how: dict[str, Any] = {"device": device or variant.device, "timeout_seconds": SECONDS}
    found = run_ranks(ranks, saved, saves, variant, folder, at, pool="to save", **how)
    found += run_ranks(
        ranks, resumed, loads or saves, variant, folder, at, bool(loads), pool="to resume", **how
    )
    return [difference for difference in found if difference]


def overflowing(config: dict[str, Any], variant: Variant) -> list[tuple[bool, bool, int]]:
    """Of each step: did it overflow, on the last rank alone, are weights, p and the position in the
    schedules what they were, and how many updates there have been."""
    engine, trace = engine_of(config, variant), []
    is_last = dist.get_rank() == dist.get_world_size() - 1

    def state() -> tuple[Any, ...]:
        host = engine.optimizer.host_optimizer
        rates = asdict(host.rule.schedule.state), engine.get_lr()
        return weights_of(engine), masters_of(engine), *rates

    for number, batch in enumerate(batches(STEPS, dist.get_rank())):
        loss = engine(on_device(batch))
        engine.backward(loss * float("inf") if number in OVERFLOWS and is_last else loss)
        before = state()
        engine.step()
        same = not first_difference(before, state())
        host = engine.optimizer.host_optimizer
        trace.append((bool(engine.optimizer.overflow), same, host.state.updates))
    finite = all(bool(master.isfinite().all()) for master in full_masters_of(engine))
    engine.destroy()
    assert finite
    return trace


def gradients_seen(config: dict[str, Any], variant: Variant) -> dict[str, Any]:
    """What users read of gradients and moments in backward, a gradient that they set, and what the
    step makes of it."""
    engine, passes = engine_of(config, variant), config["gradient_accumulation_steps"]
    for batch in batches(3 * passes, dist.get_rank()):
        engine.backward(engine(on_device(batch)))
        engine.step()
    seen: dict[str, Any] = {}
    for number, batch in enumerate(batches(passes, 7), start=1):
        engine.backward(engine(on_device(batch)))
        if number < passes:
            engine.step()
    for name, param in engine.module.named_parameters():
        if param.requires_grad:
            seen[f"{name} gradient"] = safe_get_full_grad(param).cpu().clone()
            seen[f"{name} m"] = safe_get_full_optimizer_state(param, "exp_avg").cpu().clone()
    weight = engine.module.embed.weight  # of even size: DeepSpeed sets no others
    shape = getattr(weight, "ds_shape", weight.shape)
    safe_set_full_grad(weight, torch.full(shape, 0.25, device=weight.device))
    seen["set gradient"] = safe_get_full_grad(weight).cpu().clone()
    engine.step()
    seen |= state_at_end(engine, variant)
    seen["norm"] = torch.tensor(seen["norm"])  # weights on the host: ZeRO-Offload's, in fp32
    engine.destroy()
    return seen


def seen_differs(config: dict[str, Any], other: dict[str, Any], variant: Variant) -> str:
    """How what is seen of gradients differs in two runs."""
    expected, found = (gradients_seen(each, variant) for each in (other, config))
    assert float(found["set gradient"].max()) == 0.25
    return first_difference(expected, found, "seen")
