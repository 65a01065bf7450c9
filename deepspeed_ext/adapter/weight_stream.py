"""Streams a model's exact weights from host memory, under the names of its state dict.

Each rank has p of its partitions in host memory. Bucket by bucket, the ranks round their elements
and exchange them in a group for host tensors. Of the accelerator only a share is read, so it
may serve an inference engine meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from deepspeed_ext.adapter.saved_checkpoint import Target
from deepspeed_ext.adapter.upstream import is_stored_quantized
from deepspeed_ext.adapter.zenflow_parts import ZenFlowParts, zenflow_of
from deepspeed_ext.checkpoint.layout import Fragment, Placement
from deepspeed_ext.errors import StateError, UnsupportedError
from deepspeed_ext.runtime.ranks import RankGroup, require_same_plan
from deepspeed_ext.zenflow.worker.messages import Span

_HAS_ENDED, _CALLS_ANOTHER, _GOES_ON = range(3)
"""What a rank does while weights are streamed: `_CALLS_ANOTHER` method of the engine."""
_ALIGNMENT = 16
"""Alignment of each fragment in a message, in bytes."""


@dataclass(frozen=True)
class WeightPart:
    """This rank's elements of a parameter or buffer.

    Attributes:
        names: its names in the state dict; several if it is tied.
        shape: of the whole tensor.
        begin: row-major index of the first element.
        values: 1-D, on the host, in the dtype of the model's weight.
    """

    names: tuple[str, ...]
    shape: torch.Size
    begin: int
    values: torch.Tensor


def weights(
    engine: Any, bucket_bytes: int, on_rank: int | None
) -> Iterator[tuple[str, torch.Tensor]]:
    """See `deepspeed_ext.weights`."""
    stream = _Stream(engine)
    require_same_plan("streaming weights", (bucket_bytes, on_rank), stream.ranks)
    if bucket_bytes <= 0:
        raise ValueError(f"bucket_bytes is {bucket_bytes}, expected a positive number of bytes")
    if on_rank is not None and not 0 <= on_rank < stream.ranks.size:
        raise ValueError(
            f"on_rank is {on_rank}, expected None or a number from 0 to {stream.ranks.size - 1}"
        )
    return stream.whole(bucket_bytes, on_rank)


def weight_parts(engine: Any) -> Iterator[WeightPart]:
    """See `deepspeed_ext.weight_parts`."""
    return _Stream(engine).parts()


@dataclass(frozen=True)
class _Entry:
    """A parameter or buffer.

    Attributes:
        names: see `WeightPart`.
        fragments: which rank has which elements; None: every rank has all.
        read: returns this rank's elements of a fragment, 1-D, any dtype and device; without
            fragments, the whole tensor for None.
    """

    names: tuple[str, ...]
    shape: torch.Size
    dtype: torch.dtype
    fragments: tuple[Fragment, ...] | None
    read: Callable[[Fragment | None], torch.Tensor]

    @property
    def nbytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize

    def held_by(self, rank: int) -> Iterator[Fragment]:
        return (each for each in self.fragments or () if each.rank == rank)


# Note: [a rank that stops reading]
# A consumer of streamed weights may raise on one rank. Its iterator then lives on in the traceback,
# while a `finally:` of the script calls the engine, and the other ranks wait for the next bucket.
# So every rank says what it does, in one collective: before each bucket, at the beginning of each
# call of the engine until the stream has ended, and when an iterator is freed.


class _Stream:
    """The weights of an engine between two of its steps; open while whole weights are being
    streamed, and buckets are left on all ranks."""

    def __init__(self, engine: Any) -> None:
        self._zenflow = zenflow = _require_supported(engine)
        zenflow.settle_masters()
        self._state = zenflow.host.state
        self._version = self._state.version
        self.is_open = False
        self.ranks = zenflow.state.host_ranks
        target = Target(engine.optimizer, engine._get_zero_param_shapes())
        self._placements = target.layout.placements
        # all tensors of the state dict, in its order; a tied one at its first name
        first_names = {id(param): name for name, param in engine.module.named_parameters()}
        found: dict[int, tuple[list[str], torch.Tensor]] = {}
        for name, value in engine.module.state_dict(keep_vars=True).items():
            if isinstance(value, torch.Tensor):
                found.setdefault(id(value), ([], value))[0].append(name)
        self._entries = [
            self._entry(tuple(names), value, self._placements.get(first_names.get(key, "")))
            for key, (names, value) in found.items()
        ]

    def _entry(self, names: tuple[str, ...], value: Any, placed: Placement | None) -> _Entry:
        shape = torch.Size(getattr(value, "ds_shape", value.shape))
        read: Callable[[Any], torch.Tensor] = self._read_master
        if placed is None and hasattr(value, "ds_tensor"):  # not trained, partitioned
            placed = Placement.of_one(value.ds_numel, self.ranks.size)
            read = partial(_read_from, value.ds_tensor.detach().view(-1))
        if placed is None:
            return _Entry(names, shape, value.dtype, None, lambda _: value.detach())
        return _Entry(names, shape, value.dtype, tuple(placed.fragments(0, placed.numel)), read)

    def _read_master(self, fragment: Fragment) -> torch.Tensor:
        end = fragment.offset + fragment.end - fragment.begin
        return self._state.read(fragment.flat, Span(fragment.offset, end))

    def parts(self) -> Iterator[WeightPart]:
        """This rank's elements; rank 0 also yields replicated tensors. No collective."""
        for entry in self._entries:
            self._require_unchanged()
            for fragment in entry.held_by(self.ranks.rank):
                values = entry.read(fragment).to("cpu", entry.dtype, copy=True)
                yield WeightPart(entry.names, entry.shape, fragment.begin, values)
            if entry.fragments is None and self.ranks.rank == 0:
                values = entry.read(None).to("cpu", copy=True).reshape(-1)
                yield WeightPart(entry.names, entry.shape, 0, values)

    def whole(self, bucket_bytes: int, on_rank: int | None) -> Iterator[tuple[str, torch.Tensor]]:
        """Iterate over whole tensors. A collective, which every rank iterates to its end."""
        self.is_open = True
        self._zenflow.streams.append(self)
        return self._iterate(list(_buckets(self._entries, bucket_bytes)), on_rank)

    def _iterate(
        self, buckets: list[list[_Entry]], on_rank: int | None
    ) -> Iterator[tuple[str, torch.Tensor]]:
        try:
            for number, bucket in enumerate(buckets, 1):
                self._require_unchanged()
                exchange = _Exchange(bucket, self.ranks, on_rank)
                exchange.prepare()
                if not self.agree(_GOES_ON):
                    raise StateError(
                        "another rank has stopped reading the weights: see its error. All ranks "
                        "must iterate to the end"
                    )
                self.is_open = number < len(buckets)
                for names, tensor in exchange.run():
                    for name in names:
                        yield name, tensor
        finally:
            self.agree(_HAS_ENDED)

    def agree(self, does: int = _CALLS_ANOTHER) -> bool:
        """Whether all ranks do the same, and the stream has not ended. A collective, if it is
        open."""
        if self.is_open:
            does = does if self._is_current else _HAS_ENDED
            least, most = self.ranks.minimum(does, -does)
            self.is_open = least == -most and does is not _HAS_ENDED
        return self.is_open

    @property
    def _is_current(self) -> bool:
        """Whether the weights have not changed since it began."""
        return self._state.version == self._version

    def _require_unchanged(self) -> None:
        if not self._is_current:
            raise StateError(
                "a step, a load or a write has changed the weights while they were read: read all "
                "of them in between"
            )


class _Exchange:
    """Exchanges the tensors of one bucket by one message from each rank, whose layout all ranks
    compute."""

    def __init__(self, bucket: Sequence[_Entry], ranks: RankGroup, on_rank: int | None) -> None:
        self._bucket = bucket
        self._ranks = ranks
        self._on_rank = on_rank
        self._receives = on_rank in (None, ranks.rank)
        self._sends = ranks.size > 1 and on_rank != ranks.rank
        self._wholes: list[torch.Tensor] = []
        self._message = self._incoming = torch.empty(0, dtype=torch.uint8, device="cpu")

    def prepare(self) -> None:
        """Round this rank's elements, and allocate all that `run` needs. No collective."""
        rank = self._ranks.rank
        if self._receives:
            self._wholes = [
                torch.empty(each.shape, dtype=each.dtype, device="cpu") for each in self._bucket
            ]
            for entry, whole in zip(self._bucket, self._wholes, strict=True):
                if entry.fragments is None:
                    whole.copy_(entry.read(None))
                for fragment in entry.held_by(rank):
                    _elements(whole, fragment).copy_(entry.read(fragment))
            senders = set(range(self._ranks.size)) - {rank, self._on_rank}
            largest = max((self._pieces(owner)[1] for owner in senders), default=0)
            self._incoming = torch.empty(largest, dtype=torch.uint8, device="cpu")
        pieces, nbytes = self._pieces(rank)
        if self._sends:
            self._message = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
            for number, fragment, place in pieces:
                entry = self._bucket[number]
                self._message[place].view(entry.dtype).copy_(entry.read(fragment))

    def _pieces(self, rank: int) -> tuple[list[tuple[int, Fragment, slice]], int]:
        """The message of `rank`: for each fragment the entry's index in the bucket, the fragment
        and its place in the message; and the message's size in bytes."""
        found, end = [], 0
        for number, entry in enumerate(self._bucket):
            for fragment in entry.held_by(rank):
                nbytes = (fragment.end - fragment.begin) * entry.dtype.itemsize
                found.append((number, fragment, slice(end, end + nbytes)))
                end += -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        return found, end

    def run(self) -> Iterator[tuple[tuple[str, ...], torch.Tensor]]:
        """Exchange; yield names and tensors on ranks that receive them. All communication comes
        before the first yield."""
        for owner in range(self._ranks.size):
            pieces, nbytes = self._pieces(owner)
            if nbytes and self._ranks.size > 1 and owner != self._on_rank:
                message = self._passed(owner, nbytes)
                if message is not None and owner != self._ranks.rank:
                    for number, fragment, place in pieces:
                        whole = self._wholes[number]
                        _elements(whole, fragment).copy_(message[place].view(whole.dtype))
        self._message = self._incoming = self._message.new_empty(0)
        if self._receives:
            yield from zip((each.names for each in self._bucket), self._wholes, strict=True)

    def _passed(self, owner: int, nbytes: int) -> torch.Tensor | None:
        """The message of `owner`; None on a rank that neither sends nor receives it."""
        is_mine, group = owner == self._ranks.rank, self._ranks.group
        if not is_mine and not self._receives:
            return None
        message = self._message if is_mine else self._incoming[:nbytes]
        if self._on_rank is None:
            source = self._ranks.global_rank(owner)
            torch.distributed.broadcast(message, source, group=group)
        elif is_mine:
            torch.distributed.send(message, self._ranks.global_rank(self._on_rank), group=group)
        else:
            torch.distributed.recv(message, self._ranks.global_rank(owner), group=group)
        return message


def _read_from(flat: torch.Tensor, fragment: Fragment) -> torch.Tensor:
    return flat.narrow(0, fragment.offset, fragment.end - fragment.begin)


def _elements(whole: torch.Tensor, fragment: Fragment) -> torch.Tensor:
    return whole.view(-1)[fragment.begin : fragment.end]


def _buckets(entries: Sequence[_Entry], bucket_bytes: int) -> Iterator[list[_Entry]]:
    """Split `entries` into buckets of at most `bucket_bytes`; a larger entry has its own."""
    bucket: list[_Entry] = []
    for entry in entries:
        if bucket and sum(each.nbytes for each in bucket) + entry.nbytes > bucket_bytes:
            yield bucket
            bucket = []
        bucket.append(entry)
    if bucket:
        yield bucket


def _require_supported(engine: Any) -> ZenFlowParts:
    zenflow = zenflow_of(getattr(engine, "optimizer", None))
    if zenflow is None:
        raise UnsupportedError(
            "the weights of this engine are not in host memory: expected an engine with "
            "zero_optimization.zenflow, built while the extension is enabled. For other engines "
            "use engine.module.state_dict()"
        )
    if engine.has_moe_layers or engine.mp_world_size > 1:
        raise UnsupportedError(
            "weights of experts, tensor-parallel ranks and pipeline stages cannot be streamed: "
            "save a checkpoint and convert that"
        )
    if any(is_stored_quantized(param) for param in engine.module.parameters()):
        raise UnsupportedError(
            "frozen weights that are stored quantized cannot be streamed: set "
            "zero_quantized_nontrainable_weights to false"
        )
    return zenflow
