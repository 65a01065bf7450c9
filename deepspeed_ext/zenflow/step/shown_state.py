"""Shows the optimizer's state to its users, and takes over what they change.

p and the moments are in memory that the optimizer process writes during training. Users get a
`ShownTensor` on the same memory, their handle: each access to its values, also through a handle or
view kept for many steps, first waits for the update in flight. The optimizer's own tensors are
never handed out.

`changes` compares what the user's optimizer holds with what was shown, so it notices every way to
change the state:

==============================  ================================================================
written in place                `ShownTensor` reports the access; the next step starts from the
                                new values
``.data`` rebound, entry        the values are copied to the optimizer's memory, and the handle
assigned                        is bound again
entry deleted, dict cleared or  as torch: state that is missing is fresh, with moments of zero
replaced                        and step 0
``load_state_dict``             all of these
step assigned                   the next update is number step + 1
==============================  ================================================================

A change without an exact meaning (another shape, a dtype that is not float, half of an entry) is a
`StateError`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from deepspeed_ext.errors import CheckpointError, StateError
from deepspeed_ext.runtime.log import LOAD_ANOTHER
from deepspeed_ext.zenflow.step.partition import WholeState

__all__ = ["Change", "ShownState", "ShownTensor", "nan_like", "plain", "write"]

_MOST_UPDATES = 1 << 62
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


class ShownTensor(torch.Tensor):
    """A tensor of the optimizer's state that a user may keep: p, a moment, or a view of one, on the
    host.

    Any operation that uses its values waits for the update in flight, and the next step starts from
    the values that it leaves. What only describes it is no operation, such as ``shape``,
    ``is_pinned()`` or ``data_ptr()``, and views are of this class, too; all other results, and
    pickled or deep copies, are plain tensors. Later accesses by address are not noticed:
    ``numpy()``, DLPack.
    """

    shown_by: weakref.ref[ShownState]
    __torch_function__: Any = torch._C._disabled_torch_function_impl

    @classmethod
    def of(cls, tensor: torch.Tensor, shown_by: weakref.ref[ShownState]) -> ShownTensor:
        """Another tensor on the memory of `tensor`, a plain one."""
        made: ShownTensor = torch.Tensor._make_subclass(cls, tensor, tensor.requires_grad)
        made.shown_by = shown_by
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        shown = [each for each in tree_leaves((args, kwargs)) if isinstance(each, cls)]
        with torch._C._DisableTorchDispatch():
            if func.is_view or func is torch.ops.aten.is_pinned.default:
                of = partial(cls.of, shown_by=shown[0].shown_by)
                return tree_map_only(torch.Tensor, of, func(*args, **kwargs))
            schema = func._schema.arguments
            named = dict(zip((each.name for each in schema), args, strict=False)) | kwargs
            written = tree_leaves([named.get(each.name) for each in schema if each.is_write])
            writes = any(isinstance(each, cls) for each in written)
            for shown_by in {each.shown_by for each in shown}:
                _used(shown_by, writes=writes)
            return func(*args, **kwargs)

    def _used(self) -> torch.Tensor:
        """A plain tensor on the same memory, for what is no operation."""
        _used(self.shown_by, writes=False)
        return plain(self)

    def is_pinned(self, *args: Any, **kwargs: Any) -> bool:
        return plain(self).is_pinned(*args, **kwargs)

    def numpy(self, *args: Any, **kwargs: Any) -> Any:
        return self._used().numpy(*args, **kwargs)

    def tolist(self) -> Any:
        return self._used().tolist()

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return repr(self._used())

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._used().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        if id(self) not in memo:
            memo[id(self)] = self._used().detach().clone().requires_grad_(self.requires_grad)
        copied: torch.Tensor = memo[id(self)]
        return copied


def _used(shown_by: weakref.ref[ShownState], *, writes: bool) -> None:
    if (owner := shown_by()) is None or not owner.is_open:
        raise StateError(
            "the engine of this optimizer state was destroyed, which frees p and the moments: copy "
            "what you need of them before engine.destroy()"
        )
    owner.used(writes=writes)


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """A plain tensor on the same memory; valid while nothing is in flight."""
    with torch._C._DisableTorchDispatch():
        return tensor.detach().requires_grad_(tensor.requires_grad)


def nan_like(tensor: torch.Tensor) -> torch.Tensor:
    """NaN in the place of values that a failed worker has lost."""
    return torch.full(tensor.shape, torch.nan, dtype=tensor.dtype, device="cpu")


@dataclass(frozen=True)
class Change:
    """What a user changed of one partition.

    Attributes:
        partition: its index.
        values: pairs of p or a moment in the optimizer's memory, 1-D [n], and its new value, 1-D
            [n] on any device; None: zero.
        updates: the new step; None: as before.
    """

    partition: int
    values: Sequence[tuple[torch.Tensor, torch.Tensor | None]]
    updates: int | None


@torch.no_grad()
def write(changes: Sequence[Change]) -> None:
    """Write the values of all `changes` to the optimizer's memory. Nothing may be in flight."""
    pairs = [pair for change in changes for pair in change.values]
    memory = {target.untyped_storage().data_ptr() for target, _ in pairs}
    # a handle may have been assigned to another entry: copy it before its memory is written
    values = [
        value.clone()
        if value is not None and value.untyped_storage().data_ptr() in memory
        else value
        for _, value in pairs
    ]
    for (target, _), value in zip(pairs, values, strict=True):
        if value is None:
            target.zero_()
        else:
            target.copy_(value)


class _Handles:
    """The handles on one partition's state, and the step count bound with them last."""

    def __init__(self, state: WholeState, owner: weakref.ref[ShownState]) -> None:
        self.state = state
        self.master = ShownTensor.of(state.master, owner)
        self.moments = {name: ShownTensor.of(each, owner) for name, each in state.moments.items()}
        self.updates = 0

    def pairs(self) -> Iterator[tuple[str, ShownTensor, torch.Tensor]]:
        """Name, handle and the optimizer's own tensor of p and of each moment."""
        yield "fp32", self.master, self.state.master.detach()
        for name, handle in self.moments.items():
            yield name, handle, self.state.moments[name]


class ShownState:
    """Owns everything through which users reach an optimizer's p, moments and step counts.

    Args:
        optimizer: the user's Adam or Lion, whose ``state`` shows them.
        states: this rank's partitions.
        step_value: converts a step count to the form that the optimizer keeps.
        use: called before values are accessed; waits for the update in flight, and makes the next
            step start from the values left there. Raises if that is impossible.

    Attributes:
        masters: the handles on p, in order of the partitions; each a leaf that requires a gradient,
            1-D fp32 [n].
        writes: how often users have written in place.
        is_open: whether there still are values.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        states: Sequence[WholeState],
        step_value: Callable[[int], torch.Tensor | int],
        use: Callable[[], None],
    ) -> None:
        owner = weakref.ref(self)
        self._optimizer = optimizer
        self._step_value = step_value
        self._use = use
        self.writes, self.is_open = 0, True
        self._is_quiet = False
        self._group_count = len(optimizer.param_groups)
        self._handles = [_Handles(state, owner) for state in states]

    @property
    def masters(self) -> list[Any]:
        return [handles.master for handles in self._handles]

    def handle(self, partition: int, moment: str | None) -> torch.Tensor | None:
        """The handle on p or a moment of a partition, 1-D [n]; None while `quiet`, when a load may
        replace it."""
        if self._is_quiet:
            return None
        handles = self._handles[partition]
        return handles.master if moment is None else handles.moments[moment]

    def used(self, *, writes: bool) -> None:
        """Report that a handle's values are accessed."""
        if not self._is_quiet:
            self._use()
            self.writes += writes

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """Context for DeepSpeed's own accesses, which need no report: nothing is in flight, and
        what is written is taken over in another way."""
        before, self._is_quiet = self._is_quiet, True
        try:
            yield
        finally:
            self._is_quiet = before

    # -- showing -----------------------------------------------------------------------------------

    def bind(self, updates: Sequence[int]) -> None:
        """Put the handles and these step counts into the optimizer's state. The user's own entries
        stay.

        Args:
            updates: for each partition, the updates of p and the moments once nothing is in flight.
        """
        with torch._C._DisableTorchDispatch():
            for handles, count in zip(self._handles, updates, strict=True):
                for _, handle, own in handles.pairs():
                    if handle.data_ptr() != own.data_ptr() or handle.shape != own.shape:
                        handle.data = own
                entry = self._optimizer.state.get(handles.master)
                if not isinstance(entry, dict):
                    entry = self._optimizer.state[handles.master] = {}
                entry.update(handles.moments)
                self._count(entry, count)
                handles.updates = count

    def drop_changes(self) -> None:
        """Put the handles and step counts that were bound last back into the optimizer's state,
        whatever has taken their place."""
        self.bind([handles.updates for handles in self._handles])

    def advance(self, updates: Sequence[int]) -> None:
        """Update the step counts in the optimizer's state, in place; nothing else has changed."""
        for handles, count in zip(self._handles, updates, strict=True):
            if entry := self._optimizer.state.get(handles.master):
                if isinstance(shown := entry["step"], torch.Tensor):
                    shown.fill_(count)  # a user may keep it
                else:
                    entry["step"] = count
            handles.updates = count

    def _count(self, entry: dict[str, Any], count: int) -> None:
        value = self._step_value(count)
        shown = entry.get("step")
        if (
            isinstance(value, torch.Tensor)
            and isinstance(shown, torch.Tensor)
            and _alike(shown, value)
        ):
            shown.fill_(count)
        else:
            entry["step"] = value

    # -- taking over -------------------------------------------------------------------------------

    def changes(self) -> list[Change]:
        """Find what differs from what was shown, other than values written in place.

        Raises:
            StateError: something of it has no exact meaning.
        """
        with torch._C._DisableTorchDispatch():
            self._require_masters()
            found = [self._change_of(*each, loads=False) for each in enumerate(self._handles)]
        return [change for change in found if change.values or change.updates is not None]

    def loaded(self) -> list[Change]:
        """What DeepSpeed has put into the optimizer's state from a checkpoint, for every partition.
        A moment missing in the checkpoint is zero.

        Raises:
            CheckpointError: something of it does not fit.
        """
        with torch._C._DisableTorchDispatch():
            return [self._change_of(*each, loads=True) for each in enumerate(self._handles)]

    def _require_masters(self) -> None:
        ours = {id(handles.master) for handles in self._handles}
        if len(self._optimizer.param_groups) > self._group_count:
            raise StateError(
                "groups cannot be added to the optimizer after initialize: remove "
                f"param_groups[{self._group_count}]"
            )
        for number, group in enumerate(self._optimizer.param_groups):
            if any(id(param) not in ours for param in group["params"]):
                raise StateError(
                    f"optimizer.param_groups[{number}]['params'] holds a tensor "
                    "that is not the optimizer's: put back what was there, "
                    "and write new values into it (tensor.data.copy_(...))"
                )

    def _change_of(self, index: int, handles: _Handles, *, loads: bool) -> Change:
        where, own = f"optimizer.state of partition {index}", handles.state.master.detach()
        values: list[tuple[torch.Tensor, torch.Tensor | None]] = []

        def compare(what: str, value: Any, own: torch.Tensor, is_ours: bool) -> None:
            if told := _misfit(value, own):
                raise _refusal(f"{what} {told}", loads)
            if not (is_ours and _is_on(value, own)):
                values.append((own, value.detach()))

        if not loads:
            compare(f"the fp32 partition {index}", handles.master, own, True)
        entry = self._optimizer.state.get(handles.master) or {}
        if not isinstance(entry, dict):
            raise _refusal(f"{where} is now a {_kind(entry)}, expected a dict", loads)
        for name, own in handles.state.moments.items():
            if (value := entry.get(name)) is not None:
                is_ours = loads or value is handles.moments[name]
                compare(f"{where}, {name!r},", value, own, is_ours)
            elif loads or not entry:
                values.append((own, None))
            else:
                raise StateError(
                    f"{where} has no {name!r} any more, but other entries: assign it, or delete "
                    "the whole state of this partition to start from fresh moments"
                )
        step = entry.get("step")
        if step is None and loads:
            step = self._optimizer.param_groups[handles.state.group].get("step") or 0
        elif not entry:
            step = 0
        if (count := _as_count(step)) is None:
            expected = "expected how many updates the moments have had"
            raise _refusal(f"{where}, 'step', is now {step!r}, {expected}", loads)
        return Change(index, values, count if loads or count != handles.updates else None)


def _is_on(tensor: torch.Tensor, own: torch.Tensor) -> bool:
    """Whether `tensor` shows all of `own`, in its memory."""
    return (
        tensor.data_ptr() == own.data_ptr()
        and tensor.shape == own.shape
        and tensor.dtype == own.dtype
    )


def _refusal(text: str, loads: bool) -> CheckpointError | StateError:
    if loads:
        return CheckpointError(f"{text}: {LOAD_ANOTHER}")
    return StateError(f"{text}: put back what was moved away before the next step, save or load")


def _misfit(value: Any, own: torch.Tensor) -> str:
    """Why a value cannot replace `own`; empty if it can."""
    if not isinstance(value, torch.Tensor):
        return f"is now a {_kind(value)}, expected a tensor of {own.numel()} elements"
    if value.shape == own.shape and value.dtype in _FLOATS and value.layout == torch.strided:
        return ""
    return f"is now {tuple(value.shape)} {value.dtype}, expected {tuple(own.shape)} {own.dtype}"


def _kind(value: Any) -> str:
    return type(value).__name__


def _as_count(step: Any) -> int | None:
    """A number of updates, in whatever form an optimizer keeps it; None: it is none."""
    try:
        count = float(step)
    except (TypeError, ValueError, RuntimeError):
        return None
    return int(count) if 0 <= count < _MOST_UPDATES and count.is_integer() else None


def _alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    return (one.shape, one.dtype, one.device) == (other.shape, other.dtype, other.device)
