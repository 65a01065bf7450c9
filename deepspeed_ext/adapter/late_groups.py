"""Lets a model at stages 1 and 2 wait for weights that are on their way, from the optimizer process
or from other ranks.

`LateGroups` completes what a module uses: before its forward, and whenever one of its parameters is
taken as an attribute. So a parent that uses a child's weight waits for it, too, and so does a
module that calls no forward of its own.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from deepspeed_ext.adapter.late_weights import complete_weights_of
from deepspeed_ext.gather.launch import Work, begin_copies, can_exchange
from deepspeed_ext.runtime import memory
from deepspeed_ext.runtime.backend import dist, get_accelerator
from deepspeed_ext.runtime.log import logger, warn_once
from deepspeed_ext.runtime.ranks import RankGroup
from deepspeed_ext.zenflow.plan.chunks import chunk_numel
from deepspeed_ext.zenflow.plan.places import WeightsArrival
from deepspeed_ext.zenflow.step.optimizer import HostOptimizer
from deepspeed_ext.zenflow.worker.messages import Span

__all__ = ["LateGroups", "changes_nothing", "complete_model"]


class _Part(NamedTuple):
    """Some elements of a flat buffer of DeepSpeed: a chunk of one rank's partition, or the share of
    it that steps on the accelerator."""

    group: int
    """Number of the parameter group."""
    owner: int
    """Number of the rank among those that divide the group."""
    span: Span
    """Elements of that rank's partition."""


class LateGroups:
    """The weights of one optimizer at stages 1 and 2 that arrive during the forward.

    Note: [ranks gather late weights in one order]
    A rank steps its own partitions, and every rank needs all weights. So each part is broadcast by
    its owner. Ranks may use modules in different orders, or not at all; collectives must have one
    order. So the parts have an order on which all ranks agree in each step, that in which rank 0
    has used them last. If its owner has a part before the step returns, as under the predictive
    rule, all broadcasts begin then, and the forward only waits for them. Otherwise they begin
    inside of the forward: who needs a part begins those of all parts before it as well, and
    backward those that are left. A single rank takes what it needs alone.

    Note: [two ranks exchange late weights]
    A broadcast between two ranks uses one way of their link. So where all gathers begin in the
    step, and the backend can group calls, the n-th part of one rank and the n-th of the other are
    sent at once. Under the exact rule they are not: whoever has finished a part would wait for the
    other's.

    Args:
        zero: DeepSpeed's optimizer.
    """

    def __init__(self, zero: Any, host: HostOptimizer) -> None:
        self._zero = zero
        self._host = host
        self._ranks = RankGroup.of(zero.dp_process_group)
        self._holders = [RankGroup.of(group) for group in zero.real_dp_process_group]
        self._begins_in_step = host.decided.weights_arrive is WeightsArrival.GATHERED_IN_FORWARD
        self._parts = list(self._all_parts())
        self._has_streams = not get_accelerator().is_synchronized_device()
        self._coming: list[_Part] = []  # whose gathers have not begun here, in the agreed order
        self._gathers: dict[_Part, Sequence[Work]] = {}  # that have begun since the last step
        self._used: dict[_Part, None] = {}  # in the order of their first use since the last step
        pins = self._has_streams and self._ranks.size > 1
        self._told = memory.host_empty(len(self._parts), torch.int64, pins)
        self._is_told: Any = None  # event after the copy to `_told`
        self._waits_in_step = False
        self._model: torch.nn.Module | None = None
        self._modules: list[_LateModule] = []

    def _all_parts(self) -> Iterator[_Part]:
        size, share = self._host.link.transfers.chunk_numel, self._host.share
        numels = [state.master.numel() for state in self._host.states]
        if self._begins_in_step:  # a share may be chosen later, and leaves the parts as they are
            sizes = zip(numels, self._holders, strict=True)
            size = chunk_numel(sum(numel * holders.size for numel, holders in sizes), 1)
        for index, (numel, holders) in enumerate(zip(numels, self._holders, strict=True)):
            head = 0 if share is None else share.numels[index]
            for owner in range(holders.size):
                if head:
                    yield _Part(index, owner, Span(0, head))
                for begin in range(head, numel, size):
                    yield _Part(index, owner, Span(begin, min(begin + size, numel)))

    # -- the model ---------------------------------------------------------------------------------

    def attach(self, model: torch.nn.Module, *, waits_in_step: bool) -> None:
        """Let `model` wait for what it uses. Its parameters are in their flat buffers already.

        Args:
            waits_in_step: complete all weights before a step returns.
        """
        scripted = [each for each in model.modules() if isinstance(each, torch.jit.ScriptModule)]
        if scripted:
            warn_once(
                "zenflow.weights_arrive_in_forward has no effect: scripted code, such as "
                f"{scripted[0].original_name}, takes no hooks that could wait for its weights"
            )
        self._waits_in_step = waits_in_step or bool(scripted)
        parts, self._model = self._parts_of_parameters(), model
        for module in model.modules():
            if module not in scripted and any(id(param) in parts for param in _held_by(module)):
                self._modules.append(_LateModule(self, module, parts))

    def _parts_of_parameters(self) -> dict[int, list[_Part]]:
        """The parts that hold each parameter, by its id."""
        found: dict[int, list[_Part]] = {}
        for index, group in enumerate(self._zero.bit16_groups):
            flat = self._zero.bit16_groups_flat[index]
            numel = self._host.states[index].master.numel()
            parts = [
                (part.owner * numel + part.span.begin, part.owner * numel + part.span.end, part)
                for part in self._parts
                if part.group == index
            ]
            for param in group:
                first = (param.data_ptr() - flat.data_ptr()) // flat.element_size()
                last = first + param.numel()
                found[id(param)] = [
                    part for begin, end, part in parts if begin < last and first < end
                ]
        return found

    def detach(self) -> None:
        """Let the model be as before, once all its weights are complete. Those that no longer come,
        because their rank has ended, become NaN: see Note: [lost weights]."""
        if self._coming:
            return
        lost = [error for part in self._parts if (error := self._failure_of(part))]
        self._gathers.clear()
        for module in self._modules:
            module.detach()
        self._modules = []
        if lost:
            logger.error(
                f"rank {dist.get_rank()}: {len(lost)} of {len(self._parts)} parts of the model's "
                f"weights have not arrived and are NaN ({lost[0]}): resume from the last "
                "checkpoint"
            )

    def _failure_of(self, part: _Part) -> Exception | None:
        """Wait for a part; if it has not arrived, fill it with NaN and return the error."""
        try:
            self._wait([part])
        except Exception as error:  # of the communication library, which has no type for them
            with torch.no_grad():
                self._weights(part).fill_(math.nan)
            return error
        return None

    def before_forward(self) -> None:
        """Complete everything, if any module is compiled: inside, compiled code would break its
        graph to wait."""
        is_due = any(module.due for module in self._modules)
        if is_due and self._model is not None and any(map(_is_compiled, self._model.modules())):
            self.complete()

    # -- a step ------------------------------------------------------------------------------------

    def agree(self) -> None:
        """Begin to agree on the order of the next step's parts, which `expect` finds complete. A
        collective of the data-parallel ranks."""
        if self._ranks.size > 1:
            order = {part: place for place, part in enumerate(self._used)}
            places = [order.get(part, len(order)) for part in self._parts]
            told = torch.tensor(places, dtype=torch.int64, device="cpu").to(self._ranks.device)
            self._ranks.copy_from(0, told)
            self._told.copy_(told, non_blocking=True)
            if self._has_streams:
                self._is_told = get_accelerator().current_stream().record_event()
        self._used.clear()

    def expect(self) -> None:
        """Note that a step has returned whose weights are on their way. A collective, if their
        gathers begin now."""
        if self._ranks.size > 1:
            if self._is_told is not None:
                self._is_told.synchronize()
            agreed = dict(zip(self._parts, self._told.tolist(), strict=True))
            self._parts.sort(key=agreed.__getitem__)
            self._coming = list(self._parts)
        for module in self._modules:
            module.due = True
        if self._begins_in_step:
            self._begin(len(self._coming))
        if self._waits_in_step:
            self.complete()

    # -- who uses weights --------------------------------------------------------------------------

    def complete(self, parts: Iterable[_Part] | None = None) -> None:
        """Let weights be those of the last step, for work on the current stream. A collective, if
        parts of other ranks have not been gathered.

        Args:
            parts: what is used now; None: everything.
        """
        if parts is None:
            self._gather(self._parts)
            self._gathers.clear()
            self._host.complete_weights()
            for module in self._modules:
                module.due = False
            return
        wanted = list(parts)
        self._used.update(dict.fromkeys(wanted))
        if self._ranks.size == 1:
            self._host.complete_weights((part.group, part.span) for part in wanted)
        else:
            self._gather(wanted)

    def _gather(self, wanted: Iterable[_Part]) -> None:
        """Let the current stream find `wanted`; see Note: [ranks gather late weights in one
        order]."""
        wanted = set(wanted)
        places = [place for place, part in enumerate(self._coming) if part in wanted]
        self._begin(places[-1] + 1 if places else 0)
        self._wait(wanted)

    def _begin(self, count: int) -> None:
        """Begin the gathers of the first `count` parts that are left. If a rank has ended, one that
        cannot begin stays, with those after it: so no old weights pass for new ones."""
        begun = set[_Part]()
        try:
            for parts in self._together(self._coming[:count]):
                holders = self._holders[parts[0].group]
                for part in parts:
                    if part.owner == holders.rank:
                        self._host.complete_weights([(part.group, part.span)])
                weights = {part.owner: self._weights(part) for part in parts}
                self._gathers.update(dict.fromkeys(parts, begin_copies(weights, holders)))
                begun.update(parts)
        finally:
            self._coming = [part for part in self._coming if part not in begun]

    def _weights(self, part: _Part) -> torch.Tensor:
        """Of a part; 1-D, a view of the flat buffer."""
        partition = self._zero.parallel_partitioned_bit16_groups[part.group][part.owner]
        weights: torch.Tensor = partition.data[slice(*part.span)]
        return weights

    def _together(self, parts: Iterable[_Part]) -> Iterable[list[_Part]]:
        """`parts` in the order of their gathers, those together that are one; see Note: [two ranks
        exchange late weights]."""
        found: dict[tuple[int, int, int | None], list[_Part]] = {}
        counts = Counter[tuple[int, int]]()
        for part in parts:
            pairs = self._begins_in_step and can_exchange(self._holders[part.group])
            number = counts[part.group, part.owner]
            counts[part.group, part.owner] += 1
            key = part.group, number, None if pairs else part.owner
            found.setdefault(key, []).append(part)
        return found.values()

    def _wait(self, parts: Iterable[_Part]) -> None:
        for part in parts:
            if part not in self._gathers:
                continue
            gathers = self._gathers[part]
            for gather in gathers:
                gather.wait()
            if not gathers:  # of a group that only this rank holds
                self._host.complete_weights([(part.group, part.span)])


class _LateModule:
    """One module whose weights may be on their way.

    Note: [a model that waits for its weights]
    A forward finds its weights in ``module._parameters``, its own by ``self.weight`` and a child's
    by ``self.embed.weight``. This replaces the dict by one that completes what is taken from it, as
    DeepSpeed does at stage 3. Hooks complete what a module refers to otherwise, such as the list of
    weights of ``nn.LSTM``, before its forward, and before its state dict is made or loaded: what
    comes later would replace what was loaded. Who iterates over ``parameters()`` gets them as they
    are: trainers do that after each step, to zero gradients.

    Attributes:
        due: whether weights may be on their way. Compiled code has a guard on it.
    """

    def __init__(
        self, late: LateGroups, module: torch.nn.Module, parts: dict[int, list[_Part]]
    ) -> None:
        self.due = False
        # not a decorator: torch's compiler takes seconds to import
        self._complete = torch.compiler.disable(late.complete)
        self._module = module
        self._parts = [
            *dict.fromkeys(part for p in _held_by(module) for part in parts.get(id(p), ()))
        ]
        self._hooks = [
            module.register_forward_pre_hook(self, prepend=True),
            module.register_state_dict_pre_hook(self),
            module.register_load_state_dict_pre_hook(self),
        ]
        if type(module._parameters) in (dict, _LateParameters):  # scripted modules have another
            module._parameters = _LateParameters(module._parameters, self)

    def __call__(self, *_: Any) -> None:
        """Complete the weights, in front of whatever this is a hook of."""
        if self.due:
            self.complete()

    def __reduce__(self) -> tuple[Any, ...]:
        return _hook_of_a_copy, ()

    def complete(self) -> None:
        """Let the module's weights be those of the last step; compiled code calls it as it is."""
        self._complete(self._parts)

    def detach(self) -> None:
        """Let the module be as before."""
        for hook in self._hooks:
            hook.remove()
        params = self._module._parameters
        if isinstance(params, _LateParameters) and params.late is self:
            self._module._parameters = dict(params)


def _hook_of_a_copy() -> Callable[..., None]:
    """The hook that a copy of a module has: its weights are its own."""
    return _nothing


def _nothing(*_: Any) -> None:
    pass


class _LateParameters(dict[str, Any]):
    """The parameters of a module by name; who takes one waits for it. A copy is a plain dict."""

    def __init__(self, params: dict[str, Any], late: _LateModule) -> None:
        super().__init__(params)
        self.late = late

    def __getitem__(self, name: str) -> Any:
        if self.late.due:
            self.late.complete()
        return super().__getitem__(name)

    def __reduce__(self) -> tuple[Any, ...]:
        if self.late.due:
            self.late.complete()
        return dict, (dict(self),)


def changes_nothing(load_hook: Callable[..., Any]) -> bool:
    """Whether a hook of a module's ``load_state_dict``, as torch wraps it, is ours: it leaves what
    is loaded as it is."""
    hook = vars(load_hook).get("hook", load_hook)
    return isinstance(hook, _LateModule) or hook is _nothing


def complete_model(model: torch.nn.Module) -> None:
    """Let the weights of `model` be those of the last step of an engine that has it, if any. A
    collective where ranks gather them after a step."""
    complete_weights_of(model.parameters())
    for module in model.modules():
        if isinstance(module._parameters, _LateParameters) and module._parameters.late.due:
            module._parameters.late.complete()


def _is_compiled(module: torch.nn.Module) -> bool:
    return module._compiled_call_impl is not None or "_orig_mod" in module._modules


def _held_by(module: torch.nn.Module) -> Iterator[torch.nn.Parameter]:
    """The parameters of `module` alone, and those in its lists and dicts."""
    for value in vars(module).values():
        within: Iterable[Any] = ()
        if isinstance(value, dict):
            within = value.values()
        elif isinstance(value, list | tuple):
            within = value
        yield from (each for each in within if isinstance(each, torch.nn.Parameter))
