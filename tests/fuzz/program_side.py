"""One side of a program of `tests.fuzz.programs`, on a rank: an engine, what is done to it, and
what of it is seen."""

from __future__ import annotations

import copy
import functools
import gc
import os
import sys
import traceback
from collections.abc import Callable
from contextlib import nullcontext, suppress
from typing import Any

import deepspeed
import torch
from deepspeed import comm as dist
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_get_local_fp32_param,
    safe_set_full_fp32_param,
    safe_set_full_grad,
    safe_set_full_optimizer_state,
    safe_set_local_fp32_param,
)
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from deepspeed_ext.errors import DeepSpeedExtError, StateError
from tests.fuzz.program_net import WIDTH, Net, groups_of, like, tokens_of
from tests.fuzz.programs import Operation, Program
from tests.support.compare import allow_fp16
from tests.support.zenflow import make_engine


class Side:
    """An engine, and what a program does to it.

    Args:
        extended: with the extension.
        folder: where this side saves.
    """

    def __init__(self, program: Program, config: dict[str, Any], extended: bool, folder: str):
        self.program, self.settings = program, program.settings
        self.config, self.extended, self.folder = config, extended, folder
        self.skips, self.saved, self.saves = False, "", 0
        self.frozen: set[str] = set()
        self.hooks: list[Any] = []
        self.teacher: Any = None
        self.kept: dict[str, torch.Tensor] = {}
        if self.settings.dtype == "fp16":
            allow_fp16()
        self.engine = self._engine(self.config)
        self.accumulation: int | None = None

    def _engine(self, config: dict[str, Any], module: nn.Module | None = None) -> Any:
        groups = groups_of if self.settings.groups else None
        how: dict[str, Any] = {}
        if self.settings.client:
            config = {key: config[key] for key in config if key not in ("optimizer", "scheduler")}
            how["optimizer"] = functools.partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1)
            if self.settings.scheduler:
                how["lr_scheduler"] = functools.partial(LambdaLR, lr_lambda=_falling)
        return make_engine(
            config, extended=self.extended, model=lambda: module or Net(), groups=groups, **how
        )

    def parameter(self, name: str) -> Any:
        """As an attribute: what a script keeps or iterates over may have the weights of the step
        before."""
        *path, last = name.split(".")
        return getattr(self.engine.module.get_submodule(".".join(path)), last)

    @property
    def gathers(self) -> bool:
        return self.settings.stage == 3

    def whole(self, parameters: Any, **how: Any) -> Any:
        if not self.gathers:
            return nullcontext()
        return deepspeed.zero.GatheredParameters(parameters, **how)

    def destroy(self) -> None:
        for hook in self.hooks:
            hook.remove()
        self.hooks = []
        for engine in filter(None, (self.engine, self.teacher)):
            engine.destroy()
        self.engine = self.teacher = None
        gc.collect()

    # -- what is seen ------------------------------------------------------------------------------

    def counters(self) -> dict[str, Any]:
        engine = self.engine
        norm = engine.get_global_grad_norm()
        return {
            "global_steps": engine.global_steps,
            "micro_steps": engine.micro_steps,
            "samples": engine.global_samples,
            "skipped": engine.skipped_steps,
            "lr": engine.get_lr(),
            "groups": [
                {key: group[key] for key in ("lr", "betas", "weight_decay")}
                for group in engine.optimizer.param_groups
            ],
            "boundary": engine.is_gradient_accumulation_boundary(),
            "scale": float(engine.optimizer.loss_scale),
            "norm": None if norm is None else float(norm),
        }

    def weights(self) -> dict[str, torch.Tensor]:
        self.engine.module.state_dict()  # completes what a step has left on its way
        found = {}
        for name, parameter in self.engine.module.named_parameters():
            with self.whole([parameter]):
                found[name] = _copy(parameter)
        return found

    def relink(self) -> None:
        """DeepSpeed 0.19.8 links the moments of all groups after the first group's first step."""
        zero = self.engine.optimizer
        if not hasattr(zero, "host_optimizer") and not self.gathers:
            if not all(zero.optimizer.state.get(p) for p in zero.single_partition_of_fp32_groups):
                raise KeyError("an optimizer without state")
            zero._hp_optimizer_states_linked = False
            zero._lazy_init_hp_params_optimizer_state()

    def state(self) -> dict[str, Any]:
        self.relink()
        found: dict[str, Any] = {}
        for name, parameter in self.engine.module.named_parameters():
            if name == "scale":
                continue
            found[name] = _copy(safe_get_full_fp32_param(parameter))
            for key in ("exp_avg", "exp_avg_sq"):
                found[f"{name} {key}"] = _copy(safe_get_full_optimizer_state(parameter, key))
        return found


def _falling(step: int) -> float:
    return 1.0 / (1.0 + step)


def _copy(value: Any) -> Any:
    return value.detach().cpu().clone() if isinstance(value, torch.Tensor) else value


# -- operations ------------------------------------------------------------------------------------


def backward(side: Side, seed: int, way: str, scale: float, skips: bool, how: str) -> float:
    loss = side.engine(tokens_of(seed), skips or side.skips, how)
    seen = float(loss.detach())
    loss = loss if scale == 1.0 else loss * scale
    if way == "engine":
        side.engine.backward(loss)
    else:
        (side.engine.scale(loss) if way == "scaled" else loss).backward()
    return seen


def step(side: Side) -> None:
    side.engine.step()


def idle_step(side: Side) -> None:
    """A step without a backward pass: ours says so and changes nothing. Stock repeats a step."""
    ends = side.engine.gradient_accumulation_steps() == 1
    if ends and side.extended and hasattr(side.engine.optimizer, "host_optimizer"):
        with suppress(StateError):
            side.engine.step()
            raise AssertionError("a step without a backward pass")


def micro_steps(side: Side, parts: tuple[tuple[Operation, ...], ...]) -> list[Any]:
    losses = []
    for passes in parts[: side.engine.gradient_accumulation_steps()]:
        losses += [OPERATIONS[name](side, *arguments) for name, *arguments in passes]
        side.engine.step()
    return losses


def boundary(side: Side, is_boundary: bool | None) -> None:
    if is_boundary is None:
        side.engine._is_gradient_accumulation_boundary = None
    else:
        side.engine.set_gradient_accumulation_boundary(is_boundary)


def no_sync(side: Side, operation: Operation) -> float:
    with side.engine.no_sync():
        return backward(side, *operation[1:])


def coalesce(side: Side, operations: tuple[Operation, ...]) -> list[float]:
    with side.engine.coalesce_grad_reduction():
        return [backward(side, *operation[1:]) for operation in operations]


def evaluate(side: Side, seed: int, how: str) -> float:
    modes = {"no_grad": torch.no_grad, "inference": torch.inference_mode}
    side.engine.eval()
    with modes.get(how, nullcontext)():
        loss = float(side.engine(tokens_of(seed)).detach())
    side.engine.train()
    return loss


def wasted(side: Side, seed: int) -> float:
    """A forward whose loss is not used."""
    return float(side.engine(tokens_of(seed)).detach())


def raises(side: Side, seed: int, layer: str) -> None:
    """A forward that the script's own error ends."""

    def refuse(*_: Any) -> None:
        raise ZeroDivisionError

    handle = side.engine.module.get_submodule(layer).register_forward_pre_hook(refuse)
    with suppress(ZeroDivisionError), torch.no_grad():
        side.engine(tokens_of(seed))
    handle.remove()


def crossed(side: Side, seed: int) -> list[float]:
    """Two forwards, then the backward passes of both, and a step."""
    losses = [side.engine(tokens_of(seed + number)) for number in range(2)]
    for loss in reversed(losses):
        side.engine.backward(loss)
    side.engine.step()
    return [float(loss.detach()) for loss in losses]


def retained(side: Side, seed: int) -> float:
    """Two backward passes of one loss, and a step."""
    loss = side.engine(tokens_of(seed))
    side.engine.backward(loss, retain_graph=True)
    side.engine.backward(loss)
    side.engine.step()
    return float(loss.detach())


def after_hook(side: Side, name: str) -> None:
    """A hook that only looks."""
    parameter = side.parameter(name)
    if parameter.requires_grad:
        side.hooks.append(parameter.register_post_accumulate_grad_hook(lambda p: None))


def schedule(side: Side) -> Any:
    """A scheduler that the script steps itself."""
    if side.engine.lr_scheduler is not None:
        side.engine.lr_scheduler.step()
    return side.engine.get_lr()


def local(side: Side, name: str, sets: bool) -> Any:
    """This rank's part of a master, at stage 3."""
    if not side.gathers:
        return None
    value = _copy(safe_get_local_fp32_param(side.parameter(name)))
    if sets:
        safe_set_local_fp32_param(side.parameter(name), value * 1.01)
    return value


def batch_size(side: Side, accumulation: int) -> None:
    micro = side.engine.train_micro_batch_size_per_gpu()
    side.engine.set_train_batch_size(micro * side.settings.ranks * accumulation)
    side.accumulation = accumulation


def set_group(side: Side, key: str, value: Any) -> None:
    for group in side.engine.optimizer.param_groups:
        group[key] = value


def freeze(side: Side, layer: str, is_frozen: bool) -> None:
    getattr(side.engine.module, layer).requires_grad_(not is_frozen)
    (side.frozen.add if is_frozen else side.frozen.discard)(layer)


def skip(side: Side, skips: bool) -> None:
    side.skips = skips


def get_master(side: Side, name: str) -> Any:
    return _copy(safe_get_full_fp32_param(side.parameter(name)))


def set_master(side: Side, name: str, is_nudge: bool) -> None:
    value = safe_get_full_fp32_param(side.parameter(name))
    safe_set_full_fp32_param(side.parameter(name), value * 1.01 if is_nudge else like(value))


def get_state(side: Side, name: str, key: str) -> Any:
    side.relink()
    return _copy(safe_get_full_optimizer_state(side.parameter(name), key))


def set_state(side: Side, name: str, key: str) -> None:
    side.relink()
    value = safe_get_full_optimizer_state(side.parameter(name), key)
    safe_set_full_optimizer_state(side.parameter(name), like(value) * 0.01, key)


def grads(side: Side, operation: Operation, name: str, sets: bool) -> list[Any]:
    """Backward passes of a step whose gradient is read, and set, before it."""
    seen: list[Any] = []
    for last in reversed(range(side.engine.gradient_accumulation_steps())):
        seen.append(backward(side, *operation[1:]))
        if not last:
            gradient = safe_get_full_grad(side.parameter(name))
            seen.append(_copy(gradient))
            if sets and gradient is not None:
                safe_set_full_grad(side.parameter(name), like(gradient))
        side.engine.step()
    return seen


def get_grad(side: Side, name: str) -> Any:
    return _copy(safe_get_full_grad(side.parameter(name)))


def gathered(side: Side, name: str, writes: bool) -> Any:
    parameter = side.parameter(name)
    with side.whole([parameter], modifier_rank=0 if writes else None):
        seen = _copy(parameter)
        if writes:
            with torch.no_grad():
                parameter.mul_(1.5)
    return seen


def state_dict(side: Side) -> Any:
    return side.weights()


def load_state_dict(side: Side, factor: float) -> None:
    parameters = list(side.engine.module.parameters())
    with side.whole(parameters, modifier_rank=0):
        if not side.gathers or dist.get_rank() == 0:
            values = {k: v.clone() * factor for k, v in side.engine.module.state_dict().items()}
            side.engine.module.load_state_dict(values)


def save(side: Side) -> None:
    side.saves += 1
    side.saved = f"tag{side.saves}"
    side.engine.save_checkpoint(side.folder, tag=side.saved, client_state={"number": side.saves})


def save_again(side: Side) -> None:
    """Under the tag of the save before."""
    if not side.saved:
        save(side)
    side.engine.save_checkpoint(side.folder, tag=side.saved, client_state={"number": side.saves})


def load_latest(side: Side) -> Any:
    if not side.saved:
        save(side)
    path, client = side.engine.load_checkpoint(side.folder)
    return [bool(path), "number" in (client or {})]


LOADS: dict[str, dict[str, Any]] = {
    "": {},
    "module_only": {"load_module_only": True},
    "no_optimizer": {"load_optimizer_states": False},
    "no_scheduler": {"load_lr_scheduler_states": False},
}


def load(side: Side, how: str) -> Any:
    if not side.saved:
        save(side)
    path, client = side.engine.load_checkpoint(side.folder, tag=side.saved, **LOADS[how])
    return [bool(path), "number" in (client or {})]


def load_anew(side: Side, how: str) -> Any:
    save(side)
    anew(side)
    return load(side, how)


def resume(side: Side) -> None:
    """What `load_anew` does, unseen by the program's own saves."""
    saved, number = side.saved, side.saves
    load_anew(side, "")
    side.saved, side.saves = saved, number


def anew(side: Side) -> None:
    """A new engine in place of this one."""
    side.destroy()
    side.engine = side._engine(side.config)
    if side.accumulation is not None:
        batch_size(side, side.accumulation)
    for layer in sorted(side.frozen):
        freeze(side, layer, True)


def rebuild(side: Side) -> None:
    """A new engine around the same module, at stages 1 and 2."""
    if side.gathers:
        return
    module = side.engine.module
    side.destroy()
    side.engine = side._engine(side.config, module)


def save_16bit(side: Side) -> Any:
    side.engine.save_16bit_model(side.folder, "model.bin")
    dist.barrier()
    found = torch.load(os.path.join(side.folder, "model.bin"), map_location="cpu")
    dist.barrier()
    return dict(found)


def offload_states(side: Side, evaluates: bool) -> None:
    side.engine.offload_states(pin_memory=False)
    side.engine.reload_states()


def zero_grad(side: Side, whose: str) -> None:
    {"engine": side.engine, "optimizer": side.engine.optimizer, "module": side.engine.module}[
        whose
    ].zero_grad()


def discarded(side: Side, operation: Operation, whose: str) -> float:
    """A backward pass whose gradients are thrown away."""
    loss = backward(side, *operation[1:])
    zero_grad(side, whose)
    return loss


def hook(side: Side, name: str) -> None:
    parameter = side.parameter(name)
    if parameter.requires_grad:
        side.hooks.append(parameter.register_hook(lambda gradient: gradient * 2))


def unhook(side: Side) -> None:
    while side.hooks:
        side.hooks.pop().remove()


def deepcopy(side: Side) -> Any:
    with side.whole(list(side.engine.module.parameters())):
        other = copy.deepcopy(side.engine.module)
    return {name: _copy(value) for name, value in other.named_parameters() if not side.gathers}


def direct(side: Side, seed: int, layer: str) -> Any:
    """The module, and a layer of it, called without the engine."""
    with torch.no_grad():
        loss = float(side.engine.module(tokens_of(seed)))
        part = side.engine.module.get_submodule(layer)
        return loss, _copy(part(torch.ones(2, WIDTH).to(tokens_of(0).device, _dtype(part))))


def _dtype(module: nn.Module) -> torch.dtype:
    return next(module.parameters()).dtype


def keep(side: Side) -> None:
    """Values of the weights for `load_kept`."""
    if not side.gathers:
        side.kept = {k: v.clone() for k, v in side.engine.module.state_dict().items()}


def load_kept(side: Side) -> Any:
    """Older weights, loaded right after a step."""
    if side.kept:
        side.engine.module.load_state_dict(side.kept)
    return side.weights()


def teacher(side: Side, seed: int) -> float:
    """A second engine, which is trained a step."""
    if side.teacher is None:
        side.teacher = side._engine(side.config | {"gradient_accumulation_steps": 1})
    loss = side.teacher(tokens_of(seed))
    side.teacher.backward(loss)
    side.teacher.step()
    return float(loss.detach())


def parameters(side: Side) -> Any:
    """What a script that iterates over parameters sees between steps."""
    return [(name, p.requires_grad) for name, p in side.engine.module.named_parameters()]


def train_mode(side: Side, is_training: bool) -> None:
    side.engine.train(is_training)


def optimizer_state_dict(side: Side) -> Any:
    return "optimizer_state_dict" if side.engine.optimizer.state_dict() else ""


OPERATIONS: dict[str, Callable[..., Any]] = {
    each.__name__: each
    for each in (
        backward, step, idle_step, micro_steps, boundary, no_sync, coalesce, evaluate, batch_size,
        wasted, raises, crossed, retained, after_hook, schedule, local, save_again, load_latest,
        set_group, freeze, skip, get_master, set_master, get_state, set_state, grads, get_grad,
        gathered, state_dict, load_state_dict, save, load, load_anew, resume, anew,
        rebuild, save_16bit, offload_states, zero_grad, discarded, hook, unhook, deepcopy, teacher,
        direct, keep, load_kept,
        parameters, train_mode, optimizer_state_dict,
    )
}  # fmt: skip


def trace(
    program: Program,
    config: dict[str, Any],
    extended: bool,
    folder: str,
    at: Callable[[int], None] = lambda number: None,
) -> list[dict[str, Any]]:
    """What is seen at each operation; ends with the first error, or with the final state."""
    seen: list[dict[str, Any]] = []
    torch.manual_seed(0)
    side = None
    try:
        side = Side(program, config, extended, folder)
        for number, (name, *arguments) in enumerate(program.operations):
            at(number)
            entry: dict[str, Any] = {"what": name}
            seen.append(entry)
            entry["value"] = OPERATIONS[name](side, *arguments)
            entry |= side.counters()
        seen.append({"what": "end", "state": side.state(), "weights": side.weights()})
    except Exception as error:  # whatever it is, both sides must have it
        if not seen:
            seen.append({"what": "start"})
        place = traceback.extract_tb(error.__traceback__)[-1]
        what = f"{seen[-1]['what']}: {type(error).__name__}: {error}"
        sys.stdout.write(f"USAGE ours {extended}, {what} at {place.filename}:{place.lineno}\n")
        sys.stdout.flush()
        seen[-1] |= {"error": f"{type(error).__name__}: {error}", "is": _kind(error)}
    finally:
        if side is not None:
            try:
                side.destroy()
            except Exception as error:
                seen.append({"what": "destroy", "error": f"{type(error).__name__}: {error}"})
    return seen


def _kind(error: Exception) -> str:
    return "ours" if isinstance(error, DeepSpeedExtError) else type(error).__name__
