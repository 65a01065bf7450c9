"""Draws what users do to an optimizer's state, does it to a run and to torch's AdamW, and compares
the two.

The loss is linear in the weights, so gradients do not depend on them, and torch's AdamW in fp32 on
the same partitions is an exact reference for p, the moments and the steps, whatever the weights
anticipate. A sequence begins with the same values and no state, so it can be drawn again by its
seed alone.
"""

from __future__ import annotations

import copy
import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import deepspeed
import torch
from deepspeed import comm as dist
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_optimizer_state,
    safe_get_local_fp32_param,
    safe_get_local_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_optimizer_state,
    safe_set_local_fp32_param,
    safe_set_local_optimizer_state,
)
from torch import nn

from deepspeed_ext.errors import StateError
from tests.support.compare import shared_folder
from tests.support.models import on_device, two_groups
from tests.support.zenflow import make_engine, partitions_of, zenflow_config

MOMENTS = ("exp_avg", "exp_avg_sq")
RULES: dict[str, dict[str, Any]] = {
    "predictive": {},
    "exact": {"update_rule": "exact"},
    "selective": {
        "topk_ratio": 0.3,
        "block_size": 16,
        "select_interval": 2,
        "update_interval": 1,
        "overlap_step": True,
    },
}
"""With interval 1 both rules give each element the update of torch's AdamW for each gradient."""
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
LR, STEPS_AT_ONCE = 1e-2, 3
KEPT = 4
_SHAPES = {"a": (9, 10), "b": (7,), "c": (11, 8), "d": (20,)}
_UNIT = 1 / 64


class Labelled(nn.Module):
    """Parameters whose elements have different values, 1 to 205 in units of 1/64: a bf16 holds them
    exactly, and an element of a flat partition tells by its first value which one it is."""

    def __init__(self) -> None:
        super().__init__()
        first = 1
        for name, shape in _SHAPES.items():
            count = torch.Size(shape).numel()
            values = torch.arange(first, first + count, dtype=torch.float32) * _UNIT
            setattr(self, name, nn.Parameter(values.view(shape)))
            first += count

    def forward(self, coefficients: torch.Tensor) -> torch.Tensor:
        total, begin = torch.zeros(()), 0
        for param in self.parameters():
            part = coefficients[begin : begin + param.numel()].view(param.shape)
            total = total + (param * part.to(param.dtype)).sum()
            begin += param.numel()
        return total


COUNT = sum(torch.Size(shape).numel() for shape in _SHAPES.values())


def config_of(stage: int, rule: str, dtype: torch.dtype, **zenflow: Any) -> dict[str, Any]:
    config = zenflow_config(stage, dtype, lr=LR, **{**RULES[rule], **zenflow})
    config["gradient_clipping"] = 0.0
    config["train_micro_batch_size_per_gpu"] = 1
    config["zero_optimization"]["sub_group_size"] = 150
    return config


class Side:
    """What is done to a state, whose partitions are those of `masters`."""

    def __init__(self, optimizer: Any, masters: Sequence[torch.Tensor]) -> None:
        self.optimizer = optimizer
        self.masters = masters

    def entry(self, index: int) -> dict[str, Any]:
        return self.optimizer.state[self.masters[index]]

    def tensor(self, index: int, name: str) -> torch.Tensor:
        return self.masters[index] if name == "fp32" else self.entry(index)[name]


@dataclass
class Kept:
    """A handle that is kept for many steps."""

    index: int
    name: str
    handle: torch.Tensor


class Pair:
    """A run of ours beside its reference on this rank.

    Attributes:
        ours, theirs: both states.
        log: what was done so far.
    """

    def __init__(self, config: dict[str, Any], folder: str) -> None:
        self.folder = folder
        self.engine = make_engine(config, model=Labelled, groups=two_groups)
        masters = partitions_of(self.engine)
        self.stage = self.engine.zero_optimization_stage()
        self.ours = Side(self.engine.optimizer, masters)
        self.labels = [(master.detach() / _UNIT).round().long().clone() for master in masters]
        self.first = [master.detach().clone() for master in masters]
        groups = list(range(len(masters)))
        if self.stage == 3:
            groups = [self.engine.optimizer.sub_group_to_group_id[index] for index in groups]
        decay = [group["weight_decay"] for group in self.engine.optimizer.param_groups]
        params = [nn.Parameter(values.clone()) for values in self.first]
        made = [
            {"params": [p], "weight_decay": decay[g]} for p, g in zip(params, groups, strict=True)
        ]
        self.theirs = Side(torch.optim.AdamW(made, lr=LR), params)
        self.kept: list[Kept] = []
        self.log: list[str] = []
        self._saved: tuple[str, Any] | None = None

    def begin(self) -> None:
        """The first values, and no state."""
        self.log.clear()
        self.kept.clear()
        self._saved = None
        with torch.no_grad():
            for side in (self.ours, self.theirs):
                for master, values in zip(side.masters, self.first, strict=True):
                    master.data.copy_(values)
                side.optimizer.state.clear()

    def both(self, index: int, name: str) -> list[torch.Tensor]:
        return [self.ours.tensor(index, name), self.theirs.tensor(index, name)]

    def sides(self) -> tuple[Side, Side]:
        return self.ours, self.theirs

    # -- what a run does ---------------------------------------------------------------------------

    def step(self, draw: random.Random) -> None:
        generator = torch.Generator().manual_seed(draw.randrange(1 << 30))
        self.backward(torch.randn(COUNT, generator=generator).to(torch.bfloat16).float())
        self.finish_step()

    def backward(self, coefficients: torch.Tensor) -> None:
        self.engine.backward(self.engine(on_device(coefficients)))
        with_padding = torch.cat([torch.zeros(1), coefficients])
        for param, labels in zip(self.theirs.masters, self.labels, strict=True):
            param.grad = with_padding[labels]

    def finish_step(self) -> None:
        self.engine.step()
        self.theirs.optimizer.step()

    def save(self) -> None:
        tag = f"t{len(self.log)}"
        self.engine.save_checkpoint(self.folder, tag=tag)
        values = [param.detach().clone() for param in self.theirs.masters]
        self._saved = tag, (values, copy.deepcopy(self.theirs.optimizer.state_dict()))

    def load(self) -> None:
        if self._saved is None:
            return
        tag, (values, state) = self._saved
        self.engine.load_checkpoint(self.folder, tag=tag)
        with torch.no_grad():
            for param, value in zip(self.theirs.masters, values, strict=True):
                param.copy_(value)
        self.theirs.optimizer.load_state_dict(copy.deepcopy(state))
        self.kept.clear()

    # -- comparing ---------------------------------------------------------------------------------

    def differences(self) -> Iterator[str]:
        """How p, moments and steps differ, as the handles show them now."""
        for index in range(len(self.theirs.masters)):
            yield from self._difference(index, "fp32", *self.both(index, "fp32"))
            expected = self.theirs.optimizer.state.get(self.theirs.masters[index])
            found = self.ours.entry(index)
            if not expected:  # torch makes it in the next step
                continue
            yield from (
                line
                for name in MOMENTS
                for line in self._difference(index, name, found[name], expected[name])
            )
            if float(found["step"]) != float(expected["step"]):
                yield (
                    f"partition {index}: step {float(found['step'])}, expected "
                    f"{float(expected['step'])}"
                )

    @staticmethod
    def _difference(
        index: int, name: str, found: torch.Tensor, expected: torch.Tensor
    ) -> Iterator[str]:
        found, expected = found.detach().clone(), expected.detach()
        off = (found - expected).abs() - 2e-5 * expected.abs() - (2e-6 if name == "fp32" else 1e-7)
        if found.numel() and not bool(off.max() <= 0):
            yield f"partition {index}: {name} is off by {float((found - expected).abs().max()):.2e}"


# -- what users do: each does the same to both sides -----------------------------------------------


def _place(pair: Pair, draw: random.Random, *, with_p: bool = True) -> tuple[int, str]:
    return draw.randrange(len(pair.theirs.masters)), draw.choice(
        ("fp32", *MOMENTS) if with_p else MOMENTS
    )


def has_state(pair: Pair) -> bool:
    return all(pair.theirs.optimizer.state.get(master) for master in pair.theirs.masters)


def steps(pair: Pair, draw: random.Random) -> None:
    for _ in range(draw.randint(1, STEPS_AT_ONCE)):
        pair.step(draw)


def read(pair: Pair, draw: random.Random) -> None:
    if found := list(pair.differences()):
        raise AssertionError("; ".join(found))


def read_inner(pair: Pair, draw: random.Random) -> None:
    """The optimizer inside DeepSpeed's, which shows the same."""
    pair.ours, before = Side(pair.engine.optimizer.optimizer, pair.ours.masters), pair.ours
    read(pair, draw)
    pair.ours = before


def keep(pair: Pair, draw: random.Random) -> None:
    """A handle of either optimizer, or a view of it; drawn on all ranks alike."""
    (index, name), how, inner = _place(pair, draw), draw.randrange(5), draw.random() < 0.5
    optimizer = pair.engine.optimizer.optimizer if inner else pair.engine.optimizer
    handle = Side(optimizer, pair.ours.masters).tensor(index, name)
    own = pair.engine.optimizer.host_optimizer.link.arena.find(handle.data_ptr(), handle.nbytes)
    if own is None:  # assigned or rebound a moment ago: until it is taken over it is the user's own
        return
    kept = (handle, handle.data, handle[:], handle.view(-1), handle.detach())[how]
    pair.kept = [*pair.kept, Kept(index, name, kept)][-KEPT:]


def read_kept(pair: Pair, draw: random.Random) -> None:
    for kept in pair.kept:
        for line in pair._difference(
            kept.index, kept.name, kept.handle, pair.theirs.tensor(kept.index, kept.name)
        ):
            raise AssertionError(f"kept: {line}")


def write_kept(pair: Pair, draw: random.Random) -> None:
    for kept in pair.kept:
        with torch.no_grad():
            for tensor in (kept.handle, pair.theirs.tensor(kept.index, kept.name)):
                tensor.mul_(0.75)


def write_in_place(pair: Pair, draw: random.Random) -> None:
    (index, name), factor = _place(pair, draw), draw.choice((0.0, 0.5, 1.25))
    through_data = draw.random() < 0.5
    with torch.no_grad():
        for tensor in pair.both(index, name):
            (tensor.data if through_data else tensor).mul_(factor)


def rebind_data(pair: Pair, draw: random.Random) -> None:
    """As trainers do that move the state away and back; a factor changes it on its way."""
    (index, name), factor = _place(pair, draw), draw.choice((1.0, 0.5))
    for tensor in pair.both(index, name):
        moved = tensor.data.clone() * factor
        tensor.data = torch.empty(0)
        if draw.random() < 0.3:
            evaluate(pair, draw)
        tensor.data = moved
    pair.kept = [kept for kept in pair.kept if (kept.index, kept.name) != (index, name)]


def assign(pair: Pair, draw: random.Random) -> None:
    (index, name), factor = _place(pair, draw, with_p=False), draw.choice((0.0, 0.5))
    for side in pair.sides():
        side.entry(index)[name] = side.entry(index)[name].detach().clone() * factor
    pair.kept = [kept for kept in pair.kept if (kept.index, kept.name) != (index, name)]


def swap_entries(pair: Pair, draw: random.Random) -> None:
    """One moment takes the place of both, until the next step makes two of them."""
    index = draw.randrange(len(pair.theirs.masters))
    ours, theirs = pair.ours.entry(index), pair.theirs.entry(index)
    theirs["exp_avg"] = theirs["exp_avg_sq"].clone()
    ours["exp_avg"] = ours["exp_avg_sq"]
    pair.kept = [kept for kept in pair.kept if (kept.index, kept.name) != (index, "exp_avg")]
    pair.step(draw)


def set_step(pair: Pair, draw: random.Random) -> None:
    index, number = draw.randrange(len(pair.theirs.masters)), draw.choice((0, 3, 100))
    in_place = draw.random() < 0.5
    for side in pair.sides():
        entry = side.entry(index)
        if in_place:
            entry["step"].fill_(number)
        else:
            entry["step"] = torch.tensor(float(number))


def forget(pair: Pair, draw: random.Random) -> None:
    """All state, or that of one partition, in one of the ways that there are."""
    way = draw.choice(("clear", "replace", "delete", "empty"))
    index = draw.randrange(len(pair.theirs.masters))
    for side in pair.sides():
        if way == "clear":
            side.optimizer.state.clear()
        elif way == "replace":
            side.optimizer.state = defaultdict(dict)
        elif way == "delete":
            del side.optimizer.state[side.masters[index]]
        else:
            side.entry(index).clear()
    if way in ("delete", "empty"):
        pair.kept = [kept for kept in pair.kept if kept.index != index or kept.name == "fp32"]
    else:
        pair.kept = [kept for kept in pair.kept if kept.name == "fp32"]
    pair.step(draw)


def replace_entries(pair: Pair, draw: random.Random) -> None:
    """The dict becomes another one with copies of what it held."""
    for side in pair.sides():
        held = {
            key: {name: copy.deepcopy(value) for name, value in entry.items()}
            for key, entry in side.optimizer.state.items()
        }
        side.optimizer.state = defaultdict(dict, held)
    pair.kept = [kept for kept in pair.kept if kept.name == "fp32"]


def base_round_trip(pair: Pair, draw: random.Random) -> None:
    """The inner optimizer's state dict, copied and loaded some steps later. At stage 3 it has no
    parameters."""
    if pair.stage == 3:
        return
    inner = pair.engine.optimizer.optimizer
    held = [copy.deepcopy(optimizer.state_dict()) for optimizer in (inner, pair.theirs.optimizer)]
    pair.step(draw)
    for optimizer, state in zip((inner, pair.theirs.optimizer), held, strict=True):
        optimizer.load_state_dict(state)
    pair.kept = [kept for kept in pair.kept if kept.name == "fp32"]


def save(pair: Pair, draw: random.Random) -> None:
    pair.save()


def load(pair: Pair, draw: random.Random) -> None:
    pair.load()


def offload(pair: Pair, draw: random.Random) -> None:
    pair.engine.offload_states()
    if draw.random() < 0.5:
        read(pair, draw)
    pair.engine.reload_states()


def evaluate(pair: Pair, draw: random.Random) -> None:
    pair.engine.eval()
    with torch.no_grad():
        pair.engine(on_device(torch.ones(COUNT)))
    pair.engine.train()


def exact(pair: Pair, draw: random.Random) -> None:
    """Inside `exact_weights` the model has p, rounded."""
    with pair.engine.optimizer.exact_weights():
        expected = torch.zeros(COUNT + 1)
        for labels, master in zip(pair.labels, pair.theirs.masters, strict=True):
            expected[labels] = master.detach()
        dist.all_reduce(expected[1:])
        begin = 1
        for name, param in pair.engine.module.named_parameters():
            with deepspeed.zero.GatheredParameters([param], enabled=pair.stage == 3):
                found, count = param.detach().float().view(-1).clone(), _count_of(name)
            value = expected[begin : begin + count]
            if float((found - value).abs().max()) > float(value.abs().max()) * (2**-8) + 2e-6:
                raise AssertionError(f"exact_weights: {name} is not p")
            begin += count


def _count_of(name: str) -> int:
    return torch.Size(_SHAPES[name]).numel()


def safe_functions(pair: Pair, draw: random.Random) -> None:
    """Scale p or a moment of one parameter by DeepSpeed's functions; what they get is what was
    there."""
    name = draw.choice(list(_SHAPES))
    key = draw.choice((None, *MOMENTS))
    factor = draw.choice((1.0, 0.5))
    param, extra = getattr(pair.engine.module, name), () if key is None else (key,)
    if pair.stage == 3:
        get = safe_get_local_fp32_param if key is None else safe_get_local_optimizer_state
        put = safe_set_local_fp32_param if key is None else safe_set_local_optimizer_state
    else:
        get = safe_get_full_fp32_param if key is None else safe_get_full_optimizer_state
        put = safe_set_full_fp32_param if key is None else safe_set_full_optimizer_state
    put(param, get(param, *extra).detach().clone() * factor, *extra)
    begin = 1 + sum(_count_of(other) for other in list(_SHAPES)[: list(_SHAPES).index(name)])
    with torch.no_grad():
        for index, labels in enumerate(pair.labels):
            chosen = (labels >= begin) & (labels < begin + _count_of(name))
            pair.theirs.tensor(index, key or "fp32").data[chosen] *= factor


def half_an_entry(pair: Pair, draw: random.Random) -> None:
    """What has no meaning is refused by name, and is no harm once it is put back."""
    index, name = _place(pair, draw, with_p=False)
    held = pair.ours.entry(index).pop(name)

    def put_back() -> None:
        pair.ours.entry(index)[name] = held

    _refused(pair, draw, name, put_back)


def moved_away(pair: Pair, draw: random.Random) -> None:
    index, name = _place(pair, draw)
    tensor = pair.ours.tensor(index, name)
    moved, tensor.data = tensor.data.clone(), torch.empty(0)

    def put_back() -> None:
        tensor.data = moved

    _refused(pair, draw, f"partition {index}", put_back)
    pair.kept = [kept for kept in pair.kept if (kept.index, kept.name) != (index, name)]


def _refused(pair: Pair, draw: random.Random, told: str, put_back: Callable[[], None]) -> None:
    """A step or a save is refused; then the step is taken."""
    steps = draw.random() < 0.5
    if steps:
        pair.backward(torch.ones(COUNT))
    try:
        if steps:
            pair.engine.step()
        else:
            pair.engine.save_checkpoint(pair.folder, tag="refused")
    except StateError as error:
        if told not in str(error):
            raise AssertionError(f"untrue: {error}") from None
    else:
        raise AssertionError("not refused")
    put_back()
    if steps:
        pair.finish_step()


WITHOUT_STATE: dict[Callable[[Pair, random.Random], None], int] = {
    steps: 12,
    evaluate: 1,
    exact: 1,
    save: 1,
    load: 1,
}
"""What can be done at any time, with how often it is drawn."""
ALL: dict[Callable[[Pair, random.Random], None], int] = {
    **WITHOUT_STATE,
    **dict.fromkeys((read, read_inner, keep, read_kept, write_in_place, rebind_data, assign), 3),
    **dict.fromkeys(
        (write_kept, forget, safe_functions, replace_entries, base_round_trip, set_step), 2
    ),
    **dict.fromkeys((offload, half_an_entry, moved_away, swap_entries), 1),
}


def drawn(
    pair: Pair, draw: random.Random, length: int
) -> Iterator[Callable[[Pair, random.Random], None]]:
    """So many actions, each of those that are possible then."""
    for _ in range(length):
        menu = ALL if has_state(pair) else WITHOUT_STATE
        yield from draw.choices(list(menu), weights=list(menu.values()))


def sequence(pair: Pair, seed: str, length: int) -> str:
    """Do one sequence; how it failed, or an empty string.

    Args:
        seed: of the draws; or names of actions with a blank between, which are not drawn then.
    """
    draw = random.Random(seed)
    named = {action.__name__: action for action in ALL}
    try:
        pair.begin()
        given = [named[name] for name in seed.split()] if " " in seed else drawn(pair, draw, length)
        for action in given:
            pair.log.append(action.__name__)
            action(pair, draw)
        pair.log.append("end")
        pair.step(draw)
        read(pair, draw)
    except Exception as error:
        return f"seed {seed!r}: {' '.join(pair.log)}: {type(error).__name__}: {error}"
    return ""


def sequences(config: dict[str, Any], seeds: Sequence[str], length: int) -> list[str]:
    """Do the sequences of `seeds` on this rank, beside the other ranks; those that failed. A new
    engine is built after a failure."""
    failed: list[str] = []
    left = list(seeds)
    while left:
        with shared_folder() as folder:
            pair = Pair(config, folder)
            while left:
                found = sequence(pair, left.pop(0), length)
                anywhere: list[str | None] = [None] * dist.get_world_size()
                dist.all_gather_object(anywhere, found)
                if any(anywhere):
                    failed += [text for text in anywhere if text]
                    break
            pair.engine.destroy()
    return failed
