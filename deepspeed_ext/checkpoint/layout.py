"""Computes where the elements of each parameter lie in the flat partitions of the ranks. Plain
values only.

ZeRO shards parameters in two ways, and one formula covers both: element e of a parameter lies on
rank ``(start + e) // stride``, at ``base + (start + e) % stride`` of one flat tensor there.

- Stages 1 and 2 concatenate all parameters of a group and shard the whole: `start` is the
  parameter's offset in the whole, `stride` the size of a rank's shard.
- Stage 3 shards each parameter: `stride` is the size of a rank's shard of it, `base` the offset of
  that shard in the sub-group's flat tensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from deepspeed_ext.errors import CheckpointError


@dataclass(frozen=True)
class Fragment:
    """Elements `begin` to `end` of a parameter, in a rank's flat tensor from `offset` on. `flat` is
    its index: that of the parameter group at stages 1 and 2, of the sub-group at stage 3."""

    rank: int
    flat: int
    begin: int
    end: int
    offset: int


@dataclass(frozen=True)
class Placement:
    """Where the elements of a parameter lie; see the module's docstring."""

    numel: int
    flat: int
    start: int
    stride: int
    base: int

    @classmethod
    def of_one(cls, numel: int, ranks: int) -> Placement:
        """The placement of a parameter that is sharded alone, as at stage 3, with its own flat
        tensor."""
        return cls(numel, 0, 0, max(1, -(-numel // ranks)), 0)

    def fragments(self, begin: int, end: int) -> Iterator[Fragment]:
        """Yield where elements `begin` to `end` lie, in order."""
        while begin < end:
            rank, inside = divmod(self.start + begin, self.stride)
            stop = min(end, begin + self.stride - inside)
            yield Fragment(rank, self.flat, begin, stop, self.base + inside)
            begin = stop

    def of_rank(self, rank: int) -> Fragment | None:
        """The elements on `rank`; None if it has none."""
        begin = max(0, rank * self.stride - self.start)
        end = min(self.numel, (rank + 1) * self.stride - self.start)
        return next(self.fragments(begin, end), None)


@dataclass(frozen=True)
class Layout:
    """Where all parameters lie.

    Attributes:
        placements: by name of the parameter.
        ends: for each flat tensor, the elements in the partitions of all ranks together, without
            padding at the end, and those of one partition.
    """

    ranks: int
    placements: Mapping[str, Placement]
    ends: Sequence[tuple[int, int]] = ()

    @classmethod
    def of_groups(
        cls,
        groups: Sequence[Mapping[str, int]],
        paddings: Sequence[Sequence[int]],
        parts: Sequence[int],
        ranks: int,
    ) -> Layout:
        """The layout of stages 1 and 2: for each parameter group, the elements of its parameters by
        name, in order, the padding after each, and the elements of a rank's shard, with padding."""
        placements, ends = {}, []
        for flat, (group, behind, part) in enumerate(zip(groups, paddings, parts, strict=True)):
            start = 0
            for (name, numel), padding in zip(group.items(), behind, strict=True):
                placements[name] = Placement(numel, flat, start, part, 0)
                start += numel + padding
            ends.append((start, part))
        return cls(ranks, placements, ends)

    @classmethod
    def of_sub_groups(cls, sub_groups: Sequence[Mapping[str, int]], ranks: int) -> Layout:
        """The layout of stage 3: for each sub-group, the elements of its parameters, in order."""
        placements, ends = {}, []
        for flat, sub_group in enumerate(sub_groups):
            base = 0
            for name, numel in sub_group.items():
                stride = -(-numel // ranks)
                placements[name] = Placement(numel, flat, 0, stride, base)
                base += stride
            ends.append((base * ranks, base))
        return cls(ranks, placements, ends)

    def sizes(self, rank: int) -> list[tuple[int, int]]:
        """Elements of each partition of a rank: without padding at the end, and with it."""
        return [(min(max(end - rank * part, 0), part), part) for end, part in self.ends]

    def fits(self, other: Layout) -> bool:
        """Whether partitions of the `other` layout can be used unchanged in this one: the
        placements are equal in order, and equal names have equal placements. Parameters may have
        been renamed."""
        mine, theirs = self.placements, other.placements
        return (
            self.ranks == other.ranks
            and list(mine.values()) == list(theirs.values())
            and all(mine[name] == theirs[name] for name in mine.keys() & theirs.keys())
        )

    def copies(self, saved: Layout, rank: int) -> list[tuple[Fragment, Fragment]]:
        """Plan how `rank` fills its flat tensors of this layout from those of the layout `saved`:
        pairs of a fragment to read and the fragment here that its elements belong to. Padding is
        not copied."""
        held = {name: each.of_rank(rank) for name, each in self.placements.items()}
        return [
            (source, here)
            for name, here in held.items()
            if here is not None
            for source in saved.placements[name].fragments(here.begin, here.end)
        ]

    def require_same_parameters(self, other: Layout) -> None:
        """Compare names and sizes of parameters with `other`, the layout of a checkpoint.

        Raises:
            CheckpointError: they differ.
        """
        mine, theirs = self.placements, other.placements
        found = [f"{name} is not in the checkpoint" for name in mine.keys() - theirs.keys()]
        found += [f"{name} is only in the checkpoint" for name in theirs.keys() - mine.keys()]
        found += [
            f"{name} has {mine[name].numel} elements, in the checkpoint {theirs[name].numel}"
            for name in mine.keys() & theirs.keys()
            if mine[name].numel != theirs[name].numel
        ]
        if found:
            more = f", and {len(found) - _TOLD} more" if len(found) > _TOLD else ""
            raise CheckpointError(
                "the trained parameters differ from the checkpoint's: "
                f"{'; '.join(sorted(found)[:_TOLD])}{more}. Resume "
                "with the model that was saved, and with the same parameters frozen"
            )


_TOLD = 3
