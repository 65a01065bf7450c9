"""Gives access to an optimizer's state from outside: saves, loads, and a model's exact weights.

`ExactWeights` replaces predicted weights by p, rounded to the nearest value. Exports of the model
alone run inside it: DeepSpeed's ``save_16bit_model`` and its consolidation at stage 3, which our
engine overrides, and accelerate's, so the Hugging Face Trainer's. At stages 1 and 2 accelerate
copies the state dict of the bare module on every rank, where no override of ours runs, so
`wrap_accelerate` wraps that method.

A forward in evaluation mode without gradients first enters `ExactWeights`, too;
whatever trains, saves or loads next leaves them, so training goes on as if there had been no
evaluation. That is a copy of the partitions and, at stages 1 and 2, a gather each way.

Note: [who evaluates]
The change of weights is a collective, but at stages 1 and 2 a script may evaluate on one rank
alone. So ranks first meet (`RankGroup.meet`), also to leave, unless they train. If not all come,
each goes on with the weights it has.

Note: [weights of a script]
A script may have written other weights into the model, such as an average or the best ones, to
evaluate them. So each step and load keeps a sample of the weights that it leaves, with a few
elements of each parameter. If they have changed, the evaluation uses them as they are. It uses p
after a write that no sample holds, and where weights arrive during the forward, because they are
not there when the step ends.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property, partial
from typing import Any

import torch

from deepspeed_ext.adapter.readiness import Readiness
from deepspeed_ext.adapter.step import AutocastScale
from deepspeed_ext.adapter.zero_partitions import ZeroPartitions
from deepspeed_ext.checkpoint import zenflow_state as checkpoint
from deepspeed_ext.checkpoint.zenflow_state import SavedState, read_saved_state
from deepspeed_ext.errors import CheckpointError, WorkerError
from deepspeed_ext.runtime import memory
from deepspeed_ext.runtime.backend import dist, get_accelerator
from deepspeed_ext.runtime.log import LOAD_ANOTHER, warn_once
from deepspeed_ext.runtime.ranks import RankGroup, communicating_on_host, together
from deepspeed_ext.zenflow.plan import places
from deepspeed_ext.zenflow.step.optimizer import HostOptimizer
from deepspeed_ext.zenflow.worker.messages import Span

LONGEST_MEETING_SECONDS = 30.0
_COMPARED_NUMEL = 1 << 16
"""Elements of p that are compared with their weights at once, on the host."""
_engines = Counter[tuple[int, ...]]()  # that these ranks have built
_SAMPLED = 8
"""About so many elements of each parameter are sampled."""
_ROOM = 2
"""A copy stays on the accelerator if this many times its size are free there."""


class ExactWeights:
    """Replaces the weights of one ZeRO optimizer by p, rounded: for an export, and while its model
    is evaluated. Each rank keeps a copy of its partitions meanwhile; under the exact rule, only of
    those whose p a user has written.

    Args:
        drain: waits on all ranks until p and the weights are final; its argument is that of
            `_enter`.
        ranks: those that must meet before an evaluation.
    """

    def __init__(
        self,
        host: HostOptimizer,
        partitions: ZeroPartitions,
        drain: Callable[[bool], None],
        ranks: RankGroup,
    ) -> None:
        self._host, self._partitions, self._drain, self._ranks = host, partitions, drain, ranks
        self._predicted: list[torch.Tensor] | None = None
        self._evaluates = False  # with p
        self._meets = True
        self._meetings = 0
        # of this engine in the names of its meetings: its ranks, and how many they had before
        members = tuple(map(ranks.global_rank, range(ranks.size)))
        self._id = f"{members} {_engines[members]}"
        _engines[members] += 1
        self._handle: Any = None
        self._left: torch.Tensor | None = None  # a sample of weights; None: not known
        self._written_at = -1  # the update after which a script had written weights

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Context in which the model has p, rounded to its dtype. A collective; do not step inside.
        May be nested.

        Raises:
            RankError: on every rank, if any rank has no memory for the copy of its partitions; the
                weights are unchanged.
            WorkerError: on every rank, if any rank's optimizer process has failed.
        """
        if self._predicted is not None:
            yield
            return
        try:
            self._enter()
            yield
        finally:
            self._leave()

    def _enter(self, *, takes_over: bool = True) -> None:
        """Give the model p, until `_leave`; see `StateStore.drain`. A collective."""
        self._drain(takes_over)
        with together(self._host.ranks):
            predicted = [self._kept(index) for index in range(len(self._host.state.wholes))]
        self._predicted = predicted
        with together(self._host.ranks):
            for index in range(len(predicted)):
                # in parts: a copy that converts needs memory for its result
                for part, p in self._parts(index, places.CHUNK_NUMEL):
                    part.copy_(p)
        self._partitions.spread(None)

    def _leave(self) -> None:
        """Undo `_enter`. A collective."""
        predicted, self._predicted = self._predicted, None
        if predicted is not None:
            self._partitions.spread(predicted)

    def _kept(self, index: int) -> torch.Tensor:
        """The weights of a partition to go back to: a copy, unless they are p already, as after a
        step of the exact rule."""
        weights, overlapped = self._partitions.weights(index), self._host.decided.rule.overlapped
        is_rounded = not overlapped and all(
            torch.equal(p.to(part.dtype).view(torch.uint8), part.to("cpu").view(torch.uint8))
            for part, p in self._parts(index, _COMPARED_NUMEL)
        )
        return weights if is_rounded else self._aside(weights)

    def _aside(self, weights: torch.Tensor) -> torch.Tensor:
        """A copy: on the host if gradients are there to save accelerator memory, or if the
        accelerator is nearly full."""
        on_host = self._host.decided.places.gradient is places.Place.HOST
        if not on_host and not get_accelerator().is_synchronized_device():
            on_host = memory.free_accelerator_bytes() < _ROOM * weights.nbytes
        return weights.to("cpu", copy=True) if on_host else weights.clone()

    def _parts(self, index: int, numel: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Weights of a partition and p, in parts of `numel` elements."""
        begin = 0
        for part in self._partitions.weights(index).split(numel):
            yield part, self._host.state.read(index, Span(begin, begin := begin + part.numel()))

    # -- evaluation --------------------------------------------------------------------------------

    def watch(self, module: torch.nn.Module) -> None:
        """Follow the forwards of `module`, also those that no engine sees."""
        mine, watched = weakref.ref(self), weakref.ref(module)

        def before_forward(module: torch.nn.Module, inputs: Any) -> None:
            if module is not watched():  # a deep copy has the hook, too
                return
            if not torch.compiler.is_compiling() and (weights := mine()) is not None:
                weights.before_forward(module)

        self._handle = module.register_forward_pre_hook(before_forward, prepend=True)

    def before_forward(self, module: torch.nn.Module) -> None:
        """Called before `module` runs; a collective if the weights change."""
        self._partitions.order_gathers()  # a script may have written weights
        evaluates = not module.training and not torch.is_grad_enabled()
        # whether weights may not be p; the same on all ranks
        updates = self._host.state.updates
        predicts = self._host.decided.rule.overlapped and updates > 0
        if not evaluates:
            trains = module.training and torch.is_grad_enabled()
            if trains or not self._evaluates or self._all_meet():
                self.end_evaluation()
        elif self._evaluates or not predicts or self._written_at == updates or not self._all_meet():
            return
        elif self._are_a_scripts():
            self._written_at = updates
        else:
            with torch.inference_mode(False), torch.no_grad():
                # a script may have moved the optimizer's state away, to have memory for this
                self._enter(takes_over=False)
            self._evaluates = True

    @cached_property
    def _sampled(self) -> list[torch.Tensor]:
        """The places in each partition of the elements that are sampled."""
        places = list[list[int]]([] for _ in self._host.state.wholes)
        for each in self._partitions.places().values():
            every = max(1, (each.end - each.begin) // _SAMPLED)
            places[each.partition] += range(each.begin, each.end, every)
        device = self._partitions.weights(0).device
        return [torch.tensor(found, dtype=torch.int64, device=device) for found in places]

    def _sample(self) -> torch.Tensor:
        return torch.cat([self._partitions.weights(i)[at] for i, at in enumerate(self._sampled)])

    def remember(self) -> None:
        """Sample the weights that a step or a load leaves; see Note: [weights of a script]."""
        if self._host.decided.rule.overlapped:
            with self._host.link.deferring_errors():
                self._left = None if self._host.link.stream.awaits() else self._sample()

    def _are_a_scripts(self) -> bool:
        """Whether any rank has weights of a script. A collective."""
        with together(self._host.ranks):
            is_same = self._left is None or torch.equal(self._left, self._sample())
        if self._host.ranks.all(is_same):
            return False
        warn_once(
            "the model's weights were written since the last step, so evaluation uses them as they "
            "are until the next one"
        )
        return True

    def end_evaluation(self) -> None:
        """Go back to the weights of training. A collective if they were replaced."""
        if self._evaluates:
            self._evaluates = False
            with torch.inference_mode(False), torch.no_grad():
                self._leave()

    def close(self) -> None:
        """Follow no more forwards."""
        if self._handle is not None:
            self._handle.remove()

    def _all_meet(self) -> bool:
        """Whether all ranks evaluate now; see Note: [who evaluates]."""
        if self._meets:
            what = f"evaluation {self._id} {self._meetings}"
            self._meets = self._ranks.meet(what, LONGEST_MEETING_SECONDS)
            self._meetings += 1
            if not self._meets:
                warn_once(
                    f"not all ranks evaluated within {LONGEST_MEETING_SECONDS:g} s, so evaluation "
                    "from now on uses the weights that training uses, which anticipate the update "
                    "in flight, and waits for no rank. Evaluate on every rank"
                )
        return self._meets


_wrapped: set[type] = set()


def wrap_accelerate(engine: type[Any]) -> None:
    """If accelerate is imported, run ``accelerate.Accelerator.get_state_dict`` inside the model's
    ``exporting()``, for engines of this class. The method is replaced permanently, without effect
    on other models. Idempotent."""
    accelerator = vars(sys.modules.get("accelerate", sys)).get("Accelerator")
    if accelerator is None or accelerator in _wrapped:
        return
    _wrapped.add(accelerator)
    original = accelerator.get_state_dict

    @functools.wraps(original)
    def exact_state_dict(self: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(model, engine):
            return original(self, model, *args, **kwargs)
        with model.exporting():
            return original(self, model, *args, **kwargs)

    accelerator.get_state_dict = exact_state_dict


_AUTOCAST_SCALE = "deepspeed_ext_autocast_scale"
"""Key of the loss scale of ``torch_autocast`` in an optimizer's state dict."""


class ReachedState:
    """Saves, loads and exports the state of one optimizer. In between, users reach the state by
    the handles of `StateStore`.

    Args:
        ranks: the data-parallel ranks.
        scale: the loss scale of ``torch_autocast``, which DeepSpeed does not save.
    """

    def __init__(
        self,
        host: HostOptimizer,
        partitions: ZeroPartitions,
        ranks: RankGroup,
        scale: AutocastScale | None,
        readiness: Readiness,
    ) -> None:
        self._host = host
        self._partitions = partitions
        self._ranks = ranks
        self._scale = scale
        self._readiness = readiness
        # with sharded weights, forward is a collective anyway
        meeting = host.ranks if partitions.saved_weights is None else RankGroup.alone()
        drain = partial(self.drain_together, False)
        self.exact_weights = ExactWeights(host, partitions, drain, meeting)

    @cached_property
    def host_ranks(self) -> RankGroup:
        """The data-parallel ranks, for tensors on the host. The first use is a collective."""
        return communicating_on_host(self._ranks.group)

    def settle(self) -> None:
        """Wait for updates in flight on all ranks, whose weights are then complete. A collective.

        Raises:
            WorkerError: on every rank, if any rank's worker has failed.
        """
        self._host.link.wait_together()
        self._host.complete_weights()
        self._host.state.checked = None  # users may change more before the next step

    def drain_together(self, shows: bool = True, takes_over: bool = True) -> None:
        """Call `StateStore.drain` on all ranks; raise on all if any rank's worker has failed. A
        collective."""
        self.settle()
        with together(self._host.ranks, WorkerError):
            self._host.state.drain(shows=shows, takes_over=takes_over)

    # -- saving ------------------------------------------------------------------------------------

    def saved(self, super_call: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """The state dict of `super_call`, DeepSpeed's method, with the handles on p, m, v under
        their usual keys, plus ZenFlow's state, valid until the next step or load."""
        self._host.state.drain(shows_moments=False)
        scale = {} if self._scale is None else {_AUTOCAST_SCALE: self._scale.state_dict()}
        with self._host.state.quiet():
            state = super_call()
        ours = checkpoint.state_of(self._host, self._partitions.saved_weights)
        return {**state, checkpoint.STATE_KEY: ours, **scale}

    # -- loading -----------------------------------------------------------------------------------

    def load(
        self,
        super_call: Callable[..., None],
        state_dict_list: Any,
        load_optimizer_states: bool = True,
        load_from_fp32_weights: bool = False,
        checkpoint_folder: str | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """Load a checkpoint by DeepSpeed's method, `super_call`, with its arguments; only a
        universal one has a `checkpoint_folder`. A collective."""
        loads_optimizer = load_optimizer_states or bool(checkpoint_folder)
        host, exact = self._host, False
        self.settle()
        with together(host.ranks, WorkerError):  # a universal one is written where they are shown
            host.state.drain(shows_moments=bool(checkpoint_folder))
        with together(host.ranks, CheckpointError):
            saved = None if checkpoint_folder else self._read(state_dict_list)
        try:
            with host.state.quiet():
                super_call(
                    state_dict_list,
                    load_optimizer_states,
                    load_from_fp32_weights,
                    checkpoint_folder,
                    *args,
                    **kwargs,
                )
            with together(host.ranks, CheckpointError):
                if loads_optimizer:
                    exact = self._continue(saved, checkpoint_folder or "the optimizer's state")
                else:
                    host.state.replaced()
                if self._scale is not None and not checkpoint_folder:
                    state = state_dict_list[self._ranks.rank] or {}
                    known = state.get(_AUTOCAST_SCALE, self._scale.state_dict())
                    self._scale.load_state_dict(known)
        except BaseException:
            # another load must replace what this one has put in place of the state
            host.state.bind()
            raise
        if loads_optimizer and not exact:
            with host.state.quiet():
                self._partitions.exchange_loaded()

    def _read(self, states: Any) -> SavedState | None:
        """This rank's saved ZenFlow state; None: the checkpoint has none."""
        if states is None or isinstance(states, (str, bytes)):
            return None
        if checkpoint.STATE_KEY not in (state := states[self._ranks.rank]):
            return None
        numels = [whole.master.numel() for whole in self._host.state.wholes]
        saved = read_saved_state(state[checkpoint.STATE_KEY], numels)
        self.require_continuable(saved)
        return saved

    def _continue(self, saved: SavedState | None, where: str) -> bool:
        """Take over what DeepSpeed has loaded, and write the weights that belong to it; return
        whether the run continues bitwise. `where` names what was loaded."""
        host = self._host
        self._readiness.require_groups(host.kind.optimizer.param_groups, where)
        counts = host.state.adopt(self._partitions.clear_padding)
        host.state.replaced(counts)
        exact = checkpoint.restore(host, saved, f"rank {dist.get_rank()}")
        weights = saved.weights if exact and saved is not None else None
        self._partitions.loaded(weights or [whole.master.detach() for whole in host.state.wholes])
        return exact

    def require_continuable(self, saved: SavedState | None) -> None:
        """Check that the run can continue from a saved ZenFlow state.

        Raises:
            CheckpointError: it is of another optimizer, or has no weights, which stage 3 needs.
        """
        here = self._host.kind.layout.name
        if saved is not None and saved.optimizer != here:
            raise CheckpointError(
                f"the checkpoint's state is that of {saved.optimizer.capitalize()}, "
                f"this run's optimizer is {here.capitalize()}: "
                "resume with the optimizer that wrote it, or load only the weights"
            )
        needs = self._partitions.saved_weights is not None
        if saved is not None and needs and saved.weights is None:
            without = "the saved ZenFlow state has no weights, which stage 3 needs"
            raise CheckpointError(f"{without}: {LOAD_ANOTHER}")

    def take_from_weights(self, super_call: Callable[[], None]) -> None:
        """Let `super_call` set p to the weights, and start over from p. A collective."""
        self.drain_together()
        with self._host.state.quiet(), together(self._host.ranks, CheckpointError):
            super_call()
            self._host.state.replaced()
