"""Keeps one rank's optimizer state, p, the moments and their step counts; the only way to it.

The worker steps p and the moments in the arena, where moments may be 8-bit codes. The first
elements of a partition may step on the accelerator (`Heads`) and not be on the host.
After `drain`, `read` returns p of any elements from where they are. Everyone else sees whole
partitions in the arena, moments in fp32, which take host memory while they are shown:

=============  ===================================================================================
`drain`        waits until p, m and v are final, and shows them; writing them has no effect
`expose`       the same, and the next step starts from the values that it finds there
`begin_step`   takes over what users have changed otherwise
`take_back`    takes back what was exposed
`replaced`     starts over from values that a load has written there
=============  ===================================================================================

A save does not decode the moments: the worker does, chunk by chunk, on their way to the file
(`file_parts`).

Users reach the state by handles (`ShownTensor`) in their optimizer; the arena's own tensors are
never handed out. `changes` compares what the optimizer holds with what was shown, so it notices
every way to change the state:

==============================  ================================================================
written in place                the handle reports the access; the next step starts from the new
                                values
``.data`` rebound, entry        the values are copied to the arena, and the handle is bound again
assigned
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
from functools import partial
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from deepspeed_ext.errors import CheckpointError, StateError
from deepspeed_ext.runtime.log import LOAD_ANOTHER
from deepspeed_ext.zenflow.optimizers.interface import OptimizerKind
from deepspeed_ext.zenflow.step.heads import Heads
from deepspeed_ext.zenflow.step.link import WorkerLink
from deepspeed_ext.zenflow.step.rule import Partition, UpdateRule, WholeState
from deepspeed_ext.zenflow.worker.kernel.passes import chunk_of
from deepspeed_ext.zenflow.worker.messages import FilePart, Span
from deepspeed_ext.zenflow.worker.moments import ShownMoments

_FILE_PART_BYTES = 1 << 28
"""The worker answers after each part of this many bytes, so every wait is bounded even if the disk
is slow."""
_MOST_UPDATES = 1 << 62
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
Values = list[tuple[torch.Tensor, torch.Tensor | None]]
"""Pairs of p or a moment in the arena, 1-D [n], and its new value, 1-D [n] on any device; None:
zero."""


class ShownTensor(torch.Tensor):
    """A tensor of the optimizer's state that a user may keep, on the host.

    Any operation that uses its values waits for the update in flight, and the next step starts from
    the values that it leaves. What only describes it is no operation, such as ``shape``,
    ``is_pinned()`` or ``data_ptr()``, and views are of this class, too; all other results, and
    pickled or deep copies, are plain tensors. Later accesses by address are not noticed:
    ``numpy()``, DLPack.
    """

    shown_by: weakref.ref[StateStore]
    __torch_function__: Any = torch._C._disabled_torch_function_impl

    @classmethod
    def of(cls, tensor: torch.Tensor, shown_by: weakref.ref[StateStore]) -> ShownTensor:
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


def _used(shown_by: weakref.ref[StateStore], *, writes: bool) -> None:
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


class StateStore:
    """p, the moments and the step counts of this rank's partitions.

    Args:
        kind: of the user's optimizer, whose ``state`` shows them.
        partitions: as the update rule steps them.
        wholes: the same partitions as DeepSpeed sees them, with p in place.
        heads: step the first elements of each partition on the accelerator; None: the rule steps
            all.

    Attributes:
        link, partitions, wholes, heads: the arguments.
        counts: for each partition, the updates of p and the moments whose gradients have been taken
            so far (t of the newest). They differ only if a user has reset some partitions' state.
        masters: the handles on p, in order of the partitions; each a leaf that requires a gradient,
            1-D fp32 [n].
        version: changes whenever p does, by a step, a load or a user's write.
        is_open: whether there still are values.
        checked: what `changes` found just before all ranks step, so `begin_step` does not look
            again.
    """

    def __init__(
        self,
        link: WorkerLink,
        rule: UpdateRule,
        kind: OptimizerKind,
        partitions: Sequence[Partition],
        wholes: Sequence[WholeState],
        heads: Heads | None = None,
    ) -> None:
        self.link, self._rule, self._kind = link, rule, kind
        self.partitions, self.wholes, self.heads = partitions, wholes, heads
        self.counts = [0] * len(wholes)
        self.version, self.is_open = 0, True
        self._moments = ShownMoments(kind.layout, link.arena, len(wholes), rule.block_size)
        # p, m, v may have been written from outside: the next step publishes them again
        self._is_exposed = False
        # accesses of a step or of DeepSpeed's own code need no report
        self._is_quiet = False
        self.checked: tuple[Values, list[int]] | None = None
        mine = weakref.ref(self)
        self.masters: list[Any] = [ShownTensor.of(whole.master, mine) for whole in wholes]
        self._shown = [
            {name: ShownTensor.of(moment, mine) for name, moment in whole.moments.items()}
            for whole in wholes
        ]
        self.bind()

    @property
    def updates(self) -> int:
        """Updates of the partition that has had the most."""
        return max(self.counts, default=0)

    # -- from outside ------------------------------------------------------------------------------

    def drain(
        self, *, shows: bool = True, shows_moments: bool = True, takes_over: bool = True
    ) -> None:
        """Wait until p, m, v and their step count include every gradient that was handed over.
        Later steps are bitwise unaffected.

        Args:
            shows: whether to show whole partitions on the host; `read` does without.
            shows_moments: whether to decode coded moments there, too.
            takes_over: whether to take over what a user has changed; otherwise the next step does.

        Raises:
            StateError: a user's change has no exact meaning.
            WorkerError: this rank's worker has failed.
        """
        if (error := self.link.wait()) is not None:
            raise error
        if not self._is_exposed:
            self._rule.write_back()
            if shows and self.heads is not None:
                self.heads.show()
        if shows and shows_moments:
            self._moments.show()
        if takes_over:
            self._take_over()

    def read(self, index: int, span: Span) -> torch.Tensor:
        """p of some elements of a partition, 1-D fp32, on the host; after `drain`, valid until the
        next step, load or write. Elements on the accelerator are copied."""
        values = self.wholes[index].master.detach()[slice(*span)]
        head = 0 if self.heads is None else self.heads.numels[index]
        if self.heads is None or self._is_exposed or span.begin >= head:
            return values
        there = self.heads.tensors(index)[0].view(-1)[span.begin : span.end].to("cpu")
        return torch.cat([there, values[there.numel() :]])

    def expose(self, *, shows_moments: bool = True, takes_over: bool = True) -> bool:
        """Prepare p, m, v for reading or writing from outside: drain, and make the next step start
        from their new values. If nothing is written, the next step is bitwise unchanged; it costs
        one extra worker pass. Arguments as for `drain`.

        Returns:
            False if this rank's worker has failed. The error is raised on every rank by the next
            step, because the caller may be inside a collective.
        """
        with self.link.deferring_errors():
            self.drain(shows_moments=shows_moments, takes_over=False)
        self._is_exposed = True
        if self.link.failed:
            return False
        if takes_over:
            self._take_over()
        return True

    def adopt(self, clear_padding: Callable[[list[list[torch.Tensor]]], None]) -> list[int]:
        """Copy the moments that DeepSpeed has loaded into the user's optimizer to the arena. A
        moment missing in the checkpoint is zero. `replaced` must follow.

        Args:
            clear_padding: clears it in tensors of each partition, 1-D [n]; it may be nonzero in a
                checkpoint.

        Returns:
            The loaded count of updates of each partition.

        Raises:
            CheckpointError: something of it does not fit.
        """
        values, counts = self.changes(loads=True)
        hidden = {own.data_ptr(): value for own, value in values if self._hides(own)}
        _write([each for each in values if each[0].data_ptr() not in hidden])
        arrays = (
            [hidden.get(own.data_ptr()) if self._hides(own) else own for own in whole.arrays]
            for whole in self.wholes
        )
        clear_padding([[each for each in of_one if each is not None] for of_one in arrays])
        for address, value in hidden.items():
            self._moments.put(address, value)
        return counts

    def _hides(self, own: torch.Tensor) -> bool:
        """Whether an array shows codes that are not shown."""
        return self._moments.hidden_at(own.data_ptr()) is not None

    def replaced(self, counts: Sequence[int] | None = None) -> None:
        """Start over with synchronous steps from p, m, v, which were written from outside. Nothing
        may be in flight.

        Args:
            counts: for each partition, number of updates that the new values have had; None: as
                many as the old ones.
        """
        self.version += 1
        self.counts = self.counts if counts is None else list(counts)
        self._rule.schedule.restart()
        self._rule.restart(None if counts is None else self.counts)
        self._take_back()
        self.bind()

    def file_parts(
        self, values: torch.Tensor, offset: int, crc_offsets: tuple[int, ...]
    ) -> list[FilePart] | None:
        """What the worker writes to a file for a storage of the state that users see.

        Args:
            values: the bytes of the storage, 1-D uint8, host.
            offset: the place of its first byte in the file.
            crc_offsets: where the file has the CRC of the bytes.

        Returns:
            Its parts in order; None: it is not in the arena.
        """
        place = self.link.arena.find(values.data_ptr(), values.nbytes)
        most, codes = _FILE_PART_BYTES, None
        if (hidden := self._moments.hidden_at(values.data_ptr())) is not None:
            codes, block_size = hidden
            place, most = 0, 4 * chunk_of(most // 4, block_size)  # of fp32
        if place is None:
            return None
        return [
            FilePart(*(place + begin, part.nbytes, offset + begin, crc_offsets, begin > 0), codes)
            for begin, part in zip(range(0, values.nbytes, most), values.split(most), strict=True)
        ]

    # -- handles -----------------------------------------------------------------------------------

    def handle(self, partition: int, moment: str | None) -> torch.Tensor | None:
        """The handle on p or a moment of a partition, 1-D [n]; None while `quiet`, when a load may
        replace it."""
        if self._is_quiet:
            return None
        return self.masters[partition] if moment is None else self._shown[partition][moment]

    def used(self, *, writes: bool) -> None:
        """Called before a user's access to the values of a handle."""
        if self._is_quiet:
            return
        if not self.expose(takes_over=False):
            error = self.link.wait()
            assert error is not None
            raise error
        self.version += writes

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """Context for DeepSpeed's own accesses, which need no report: nothing is in flight, and
        what is written is taken over in another way."""
        before, self._is_quiet = self._is_quiet, True
        try:
            yield
        finally:
            self._is_quiet = before

    def bind(self) -> None:
        """Put the handles and step counts into the optimizer's state, whatever has taken their
        place. The user's own entries stay."""
        state = self._kind.optimizer.state
        with torch._C._DisableTorchDispatch():
            for whole, master, moments in zip(self.wholes, self.masters, self._shown, strict=True):
                for handle, own in zip((master, *moments.values()), whole.arrays, strict=True):
                    if not _is_on(handle, own):
                        handle.data = own
                if not isinstance(state.get(master), dict):
                    state[master] = {}
                state[master].update(moments)
            self._show_counts()

    def _show_counts(self) -> None:
        """Put the step counts into the optimizer's state; in place, because a user may keep
        them."""
        like = self._kind.step_value(0)
        for master, count in zip(self.masters, self.counts, strict=True):
            if entry := self._kind.optimizer.state.get(master):
                shown = entry.get("step")
                if isinstance(like, torch.Tensor) and getattr(shown, "shape", None) == like.shape:
                    shown.fill_(count)
                else:
                    entry["step"] = self._kind.step_value(count)

    def changes(self, *, loads: bool = False) -> tuple[Values, list[int]]:
        """Find what differs from what was shown, other than values written in place.

        Args:
            loads: whether DeepSpeed has loaded the optimizer's state from a checkpoint, and p is in
                the arena.

        Returns:
            New values, and the count of updates of each partition.

        Raises:
            StateError: something of it has no exact meaning; `CheckpointError` if `loads`.
        """
        values: Values = []
        with torch._C._DisableTorchDispatch():
            if not loads:
                self._require_masters()
            counts = [self._changes_of(index, values, loads) for index in range(len(self.wholes))]
        return values, counts

    def _require_masters(self) -> None:
        ours = set(map(id, self.masters))
        for number, group in enumerate(self._kind.optimizer.param_groups):
            if any(id(param) not in ours for param in group["params"]):
                raise StateError(
                    f"optimizer.param_groups[{number}]['params'] holds a tensor that is not the "
                    "optimizer's: remove the group if it was added after initialize; otherwise put "
                    "back what was there, and write new values into it (tensor.data.copy_(...))"
                )

    def _changes_of(self, index: int, values: Values, loads: bool) -> int:
        """Add a partition's new values to `values`; return its count of updates."""
        whole, where = self.wholes[index], f"optimizer.state of partition {index}"
        entry = self._kind.optimizer.state.get(self.masters[index]) or {}
        if not isinstance(entry, dict):
            raise _refusal(f"{where} is now a {type(entry).__name__}, expected a dict", loads)
        found: list[tuple[str, Any, torch.Tensor]] = []
        if not loads:
            found.append((f"the fp32 partition {index}", self.masters[index], whole.arrays[0]))
        for name, own in whole.moments.items():
            if entry and not loads and entry.get(name) is None:
                raise StateError(
                    f"{where} has no {name!r} any more, but other entries: assign it, or delete "
                    "the whole state of this partition to start from fresh moments"
                )
            found.append((f"{where}, {name!r},", entry.get(name), own))
        for what, value, own in found:
            if value is None:
                values.append((own, None))
            elif told := _misfit(value, own):
                raise _refusal(f"{what} {told}", loads)
            elif not _is_on(value, own):
                values.append((own, value.detach()))
        step = entry.get("step")
        if step is None and loads:
            step = self._kind.optimizer.param_groups[whole.group].get("step") or 0
        elif not entry:
            step = 0
        if (count := _as_count(step)) is None:
            expected = "expected how many updates the moments have had"
            raise _refusal(f"{where}, 'step', is now {step!r}, {expected}", loads)
        return count

    # -- around a step -----------------------------------------------------------------------------

    def begin_step(self) -> None:
        """Begin a step, which starts from what users have changed. Errors are kept for the next
        wait of all ranks."""
        with self.link.deferring_errors():
            self._take_over(self.checked)
        self.version += 1
        self._is_quiet = True

    def take_back(self) -> None:
        """Let the worker start from what was exposed; from now on codes are the state again."""
        with self.link.deferring_errors():
            if self._is_exposed:
                self.link.wait()  # no collective, because other ranks may not be exposed
                self._is_exposed = self.link.is_unread = False
                self._take_back()
                self._rule.resume()
            self._moments.begin_step()

    def hide(self) -> None:
        """Free the memory of what was shown and is no longer read."""
        if self.heads is not None:
            self.heads.hide()
        self._moments.hide()

    def end_step(self) -> None:
        """Count the step."""
        self.counts = [count + 1 for count in self.counts]
        self._is_quiet = False
        self._show_counts()

    # -- inside ------------------------------------------------------------------------------------

    def _take_over(self, checked: tuple[Values, list[int]] | None = None) -> None:
        """Take over what a user has changed, other than by writing in place, so that the next step
        starts from it: what was `checked`, or what is found now. Raises as `drain`."""
        values, counts = checked or self.changes()
        self.checked = None
        if not values and counts == self.counts:
            return
        self.version += 1
        self.drain(takes_over=False)
        _write(values)
        for partition, before, count in zip(self.partitions, self.counts, counts, strict=True):
            if count != before:
                self._rule.recounted(partition, count)
        self.counts = counts
        self._is_exposed = True
        self.bind()

    @torch.no_grad()
    def _take_back(self) -> None:
        """Take back what others may have written where it was shown."""
        self._moments.take()
        if self.heads is not None:
            self.heads.take()


@torch.no_grad()
def _write(values: Values) -> None:
    """Write to the arena. Nothing may be in flight."""
    memory = {own.untyped_storage().data_ptr() for own, _ in values}
    # a handle may have been assigned to another entry: copy it before its memory is written
    copies = [
        value.clone()
        if value is not None and value.untyped_storage().data_ptr() in memory
        else value
        for _, value in values
    ]
    for (own, _), value in zip(values, copies, strict=True):
        if value is None:
            own.zero_()
        else:
            own.copy_(value)


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
    expected = f"expected a tensor of {own.numel()} elements"
    if not isinstance(value, torch.Tensor):
        return f"is now a {type(value).__name__}, {expected}"
    if value.shape == own.shape and value.dtype in _FLOATS and value.layout == torch.strided:
        return ""
    return f"is now {tuple(value.shape)} {value.dtype}, expected {tuple(own.shape)} {own.dtype}"


def _as_count(step: Any) -> int | None:
    """A number of updates, in whatever form an optimizer keeps it; None: it is none."""
    try:
        count = float(step)
    except (TypeError, ValueError, RuntimeError):
        return None
    return int(count) if 0 <= count < _MOST_UPDATES and count.is_integer() else None
