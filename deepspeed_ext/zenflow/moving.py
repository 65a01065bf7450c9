"""Moves a run to another plan between two steps, without rounding.

p and the moments of what moves are copied to the accelerator, and the host's arrays then begin
after those elements. Later steps equal those of a run that began with this plan and the same p and
moments. Elements never move back: their host memory may be in use by others.
"""

from __future__ import annotations

from deepspeed_ext.errors import OutOfMemoryError
from deepspeed_ext.runtime.ranks import agreed
from deepspeed_ext.zenflow.built_parts import landing_buffers, partition_of, prepare_kernels
from deepspeed_ext.zenflow.plan.plan import ZenFlowPlan
from deepspeed_ext.zenflow.plan.share import with_host_share
from deepspeed_ext.zenflow.step.accelerator_share import AcceleratorShare
from deepspeed_ext.zenflow.step.link import UpdatePhase
from deepspeed_ext.zenflow.step.optimizer import HostOptimizer

__all__ = ["move", "move_share"]


def move_share(host: HostOptimizer, plan: ZenFlowPlan, host_share: float, why: str) -> bool:
    """Step all but `host_share` of each partition on the accelerator from now on. A collective
    between two steps.

    Args:
        plan: the run's plan, or the same without landing buffers.

    Returns:
        False if an accelerator has no memory for it; then nothing has changed.
    """
    hides = host.link.phase is not UpdatePhase.EXPOSED
    return move(host, with_host_share(plan, host_share, why), hides=hides)


def move(host: HostOptimizer, plan: ZenFlowPlan, *, hides: bool) -> bool:
    """Continue with `plan`.

    Args:
        hides: whether to free the host memory of what has moved; False if p and the moments may
            have been written from outside, so that the next step reads them there again.

    Returns:
        False if an accelerator has no memory for it; then nothing has changed.

    Raises:
        WorkerError: on every rank, if any rank's worker has failed.
    """
    link, ranks = host.link, host.ranks
    link.wait_together()
    weights = [state.weights() for state in host.states]
    with link.deferring_errors():
        link.transfers.release()
    share = AcceleratorShare.if_all_have_room(plan, weights, link.arena, host.kind, ranks)
    if share is None:
        with link.deferring_errors():
            link.transfers.restore()
        return False
    prepare_kernels(plan, host.kind, weights, warns=ranks.rank == 0)
    with link.deferring_errors():
        share.take()
    buffers = landing_buffers(plan, ranks)
    if buffers is None:
        told = "smaller landing buffers do not fit where larger ones were"
        raise agreed(OutOfMemoryError(told), ranks)
    with link.deferring_errors():
        link.relay(plan, buffers)
        partitions = [
            partition_of(plan, index, state, link.arena) for index, state in enumerate(host.states)
        ]
        host.move_to(plan, partitions, share)
        if hides:  # what is freed was copied by blocking copies
            share.hide()
    link.raise_deferred()
    return True
