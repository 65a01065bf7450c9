"""Says what ZenFlow holds in memory, by kind and phase, from the plan alone.

`commands.memory` adds what DeepSpeed holds.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from deepspeed_ext.zenflow.plan.arrays import OF_CHUNKS, ArraySpec, plan_layout
from deepspeed_ext.zenflow.plan.chunks import CODED_CHUNK_NUMEL, CONVERTED_NUMEL, UPLOAD_NUMEL, chunk_of
from deepspeed_ext.zenflow.plan.places import Copies, Place
from deepspeed_ext.zenflow.plan.plan import PartitionPlan, ZenFlowPlan, head_of
from deepspeed_ext.zenflow.plan.predictive import PredictiveSettings
from deepspeed_ext.zenflow.plan.rule_bytes import RuleBytes, bytes_of, share_step_bytes
from deepspeed_ext.zenflow.plan.selective import SelectiveSettings
from deepspeed_ext.zenflow.worker.kernel.adam_pass import DTYPE_BYTES

__all__ = ["ARENA_KINDS", "SHARE", "Held", "Part", "Phase", "largest"]

SHARE = "optimizer's share"
ARENA_KINDS = {
    "p": "master",
    "m": "moment m",
    "v": "moment v",
    "m_scales": "scales of m",
    "v_scales": "scales of v",
    "y": "published weights",
    "g": "gradient ring",
    "chunks": "chunks in transit",
    "block_means": "block means",
    "known": "signs and means",
    "updates": "update counts",
}
"""Names of the arena's kinds of arrays in a report; "chunks" are gradients and y that pass through
a few places. Others take no memory between steps: where moments that are codes are shown to those
who read or load them."""

MOST_PLACED = 32
"""Maximum number of partitions that are placed in the arena one by one."""

_FLOAT_BYTES = 4
_DECODING_BYTES = 16
"""Of an element that is decoded: its value, two temporaries of fp32, and a value of the chunk
before."""


class Phase(enum.Enum):
    """A part of a run. Memory held between steps is also held in the three phases after it."""

    START = "start-up"
    BETWEEN = "between steps"
    BACKWARD = "forward and backward"
    STEP = "optimizer step"
    SAVE = "save"


@dataclass(frozen=True)
class Part:
    """Memory of one kind.

    Attributes:
        kind: the kind of its content.
        nbytes: bytes of one rank.
        page_locked: host memory that cannot be swapped and that the accelerator reaches directly.
    """

    kind: str
    nbytes: int
    page_locked: bool = False

    def __post_init__(self) -> None:
        assert self.nbytes >= 0, f"{self.kind}: {self.nbytes} bytes"


def largest(*moments: Sequence[Part]) -> tuple[Part, ...]:
    """The moment of a phase with the most bytes, without its empty parts."""
    return tuple(part for part in max(moments, key=_total) if part.nbytes)


def _total(parts: Sequence[Part]) -> int:
    return sum(part.nbytes for part in parts)


class Held:
    """What a rank holds because of ZenFlow.

    Args:
        plan: the rank's plan.
    """

    def __init__(self, plan: ZenFlowPlan) -> None:
        self._plan = plan
        self._item = DTYPE_BYTES[plan.dtypes.weights]

    def nbytes(self, place: Place, phase: Phase) -> int:
        """Maximum bytes of a phase, on the accelerator or on the host."""
        if place is Place.HOST:
            return _total(self._host(phase))
        return _total(self._accelerator(phase))

    def _host(self, phase: Phase) -> list[Part]:
        if phase is Phase.START:
            return self.arena(at_start=True)
        found = self.on_host()
        if phase is Phase.STEP:
            return [*found, self.moved()]
        if phase is Phase.SAVE:
            return [*found, self.shown(), self.counts(), self.decoded()]
        return found

    def _accelerator(self, phase: Phase) -> list[Part]:
        found = self.on_accelerator()
        if phase is Phase.START:
            return [part for part in found if part.kind in (SHARE, "landing buffers")]
        if phase is Phase.STEP:
            most = max(each.numel for each in self._plan.partitions)
            return [*found, *(self.updating(most) if self._computes_there else self.lifting(most))]
        return found

    @property
    def _computes_there(self) -> bool:
        return self._plan.places.gradient is Place.ACCELERATOR

    def _of_rule(self, numel: int) -> RuleBytes:
        return bytes_of(self._plan.rule, numel, self._item)

    def _kept(self) -> dict[str, int]:
        """The rule's state, where the weights are computed."""
        kept: dict[str, int] = {}
        for each in self._plan.partitions:
            for kind, nbytes in self._of_rule(each.on_host).kept.items():
                kept[kind] = kept.get(kind, 0) + nbytes * each.times
        return kept

    # -- on the accelerator ------------------------------------------------------------------------

    def on_accelerator(self) -> list[Part]:
        """Landing buffers, the share of the optimizer and the rule's own state."""
        if not self._computes_there:
            return []
        kept = {"landing buffers": self._plan.landing_bytes, SHARE: self._plan.share_bytes}
        return [Part(kind, nbytes) for kind, nbytes in (kept | self._kept()).items()]

    def updating(self, numel: int) -> list[Part]:
        """Temporaries while a partition of `numel` elements is updated on the accelerator."""
        plan, whole = self._plan, sum(each.numel * each.times for each in self._plan.partitions)
        head, others = self._head(numel), whole - numel
        step = bytes_of(
            plan.rule,
            numel - head,
            self._item,
            arrived_bytes=DTYPE_BYTES[plan.dtypes.published],
            in_place=plan.copies is Copies.BESIDE_STEP,
        ).step
        share = share_step_bytes(head, plan.rule.block_size, plan.rule.layout)
        waiting = self._of_rule(others - self._head(others)).waiting  # of the other sub-groups
        return [Part("temporaries", max(step, share)), Part("new hot weights", waiting)]

    def _head(self, numel: int) -> int:
        """How many of `numel` elements step on the accelerator."""
        return head_of(numel, self._plan.host_share, self._plan.rule.block_size)

    def lifting(self, numel: int) -> list[Part]:
        """Temporaries while weights that the host has computed come to a partition of `numel`
        elements."""
        arrived = DTYPE_BYTES[self._plan.dtypes.published]
        converted = arrived * min(numel, CONVERTED_NUMEL) if arrived != self._item else 0
        waiting = self._of_rule(numel).waiting
        return [Part("temporaries", converted), Part("new hot weights", waiting)]

    def exchange(self, ranks: int) -> list[Part]:
        """While stages 1 and 2 exchange only hot weights; with a share, all change in every
        step."""
        if self._plan.has_share:
            return []
        numel = sum(each.numel * each.times for each in self._plan.partitions)
        nbytes = bytes_of(self._plan.rule, numel, self._item, ranks=ranks).exchange
        return [Part("hot weights of all ranks", nbytes)]

    # -- on the host -------------------------------------------------------------------------------

    def on_host(self) -> list[Part]:
        """The arena, state of hot blocks, and what is kept to compute weights there."""
        plan = self._plan
        runs = plan.partitions
        hot = sum(self._of_rule(each.on_host).kept_on_host * each.times for each in runs)
        found = [*self.arena(at_start=False), Part("hot state", hot, page_locked=True)]
        if self._computes_there:
            return found
        found += [Part(kind, nbytes) for kind, nbytes in self._kept().items()]
        uploads = plan.copies is Copies.WEIGHTS and isinstance(plan.rule, PredictiveSettings)
        most = max(each.numel for each in runs)
        numel = min(most, chunk_of(UPLOAD_NUMEL, plan.rule.block_size)) if uploads else 0
        return [*found, Part("weights on their way", 2 * self._item * numel, page_locked=True)]

    @property
    def largest_on_host(self) -> int:
        """Elements of the largest partition that step on the host."""
        return max(each.on_host for each in self._plan.partitions)

    def arena(self, *, at_start: bool) -> list[Part]:
        """The arena's arrays, in whole pages; `at_start` those that the worker touches then."""
        nbytes = dict.fromkeys(ARENA_KINDS, 0)
        for specs, count in self._laid_out():
            touched = {spec.key: spec.touched or not at_start for spec in specs}
            for key, size in plan_layout(specs).page_bytes().items():
                kind = "chunks" if key.partition == OF_CHUNKS else key.kind
                if kind in ARENA_KINDS and touched[key]:
                    nbytes[kind] += size * count
        exchanged = {"g", "y", "chunks", "block_means", "known"}
        if not self._computes_there:
            exchanged = {"g"} if self._plan.places.weights is Place.HOST else {"g", "y"}
        return [Part(ARENA_KINDS[kind], size, kind in exchanged) for kind, size in nbytes.items()]

    def _laid_out(self) -> Iterator[tuple[list[ArraySpec], int]]:
        """Groups of arrays that are placed together, and the number of such groups. Exact for up to
        `MOST_PLACED` partitions. With more, each counts like the first; its arrays may lie on one
        page more or less."""
        plan, groups = self._plan, list[tuple[list[PartitionPlan], int]]()
        if sum(each.times for each in plan.partitions) <= MOST_PLACED:
            groups = [([each for each in plan.partitions for _ in range(each.times)], 1)]
        else:
            groups = [([each], each.times) for each in plan.partitions]
        for group, count in groups:
            found = (plan.kinds.of(at, each.on_host, each.head) for at, each in enumerate(group))
            yield [spec for specs in found for spec in specs], count
        yield [spec for spec in plan.arena if spec.partition == OF_CHUNKS], 1

    def moved(self) -> Part:
        """Temporaries of a step: state that moves when hot blocks are selected, or those of hot
        blocks that step on the host."""
        rule = self._of_rule(max(each.numel for each in self._plan.partitions))
        steps_here = not self._computes_there and isinstance(self._plan.rule, SelectiveSettings)
        return Part("temporaries", max(rule.moved, rule.step if steps_here else 0))

    # -- while it saves ----------------------------------------------------------------------------

    def moved_by_selection(self) -> Part:
        """State that a save moves back from the accelerator before it writes."""
        most = max(each.numel for each in self._plan.partitions)
        return Part("temporaries", self._of_rule(most).moved)

    def shown(self) -> Part:
        """What steps on the accelerator, shown on the host."""
        heads = sum(each.head * each.times for each in self._plan.partitions)
        return Part("shown state", len(self._plan.rule.layout.kinds) * _FLOAT_BYTES * heads)

    def counts(self) -> Part:
        """What every save copies of the rule's state."""
        runs = self._plan.partitions
        copied = sum(self._of_rule(each.on_host).copied * each.times for each in runs)
        return Part("copy of the rule's state", copied)

    def decoded(self) -> Part:
        """Moments that are codes, on their way to a file."""
        rule, most = self._plan.rule, max(each.numel for each in self._plan.partitions)
        at_once = min(chunk_of(CODED_CHUNK_NUMEL, rule.block_size), most)
        return Part("moments on their way", _DECODING_BYTES * at_once if rule.layout.is_coded else 0)

    def saved(self) -> list[tuple[int, int]]:
        """Bytes of each tensor of the rule that a save writes, and how many there are of it."""
        return [(nbytes, each.times) for each in self._plan.partitions for nbytes in self._of_rule(each.on_host).saved]
