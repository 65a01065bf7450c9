"""Implements the passes with chunked torch operations: the native kernel's definition in tests, and
its fallback."""

import ctypes
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

import deepspeed_ext.runtime.first_calls  # noqa: F401
from deepspeed_ext.zenflow.worker.kernel.adam_pass import (
    DTYPE_BYTES,
    AdamPass,
    AdamStep,
    Array,
    Publish,
)
from deepspeed_ext.zenflow.worker.kernel.codes import decode, loaded, round_moments, store
from deepspeed_ext.zenflow.worker.kernel.lion_pass import LION_STATE, LionPass, LionStep

__all__ = ["ReferenceKernel", "block_means_into", "known_into", "publish_into", "take_steps"]

_START_SECONDS = 60.0
"""Longest time for all threads of a pool to start, on a busy machine."""
# three fp32 arrays and the temporaries of a chunk stay in a core's L2 cache
_CHUNK_NUMEL = 128 * 1024


def as_tensor(array: Array) -> torch.Tensor:
    """View ``array`` as a 1-D CPU tensor. The memory must outlive the tensor."""
    buffer = (ctypes.c_char * (array.numel * DTYPE_BYTES[array.dtype])).from_address(array.address)
    return torch.frombuffer(buffer, dtype=getattr(torch, array.dtype), count=array.numel)


class ReferenceKernel:
    """Runs passes with torch on the CPU, in a pool of ``threads`` threads.

    Each thread processes whole chunks and runs its operations alone: operations split among threads
    would each wait for the slowest thread. Results depend neither on the number of threads nor on
    the chunk size, because every operation is elementwise and chunks end at block boundaries. The
    calling process's number of torch threads does not change.

    Args:
        threads: number of threads.
        chunk_numel: elements per chunk, rounded down to whole blocks, but at least one block.
    """

    name = "reference"

    def __init__(self, threads: int, chunk_numel: int = _CHUNK_NUMEL) -> None:
        self._pool = _undivided_threads(threads)
        self._chunk_numel = chunk_numel

    def run(self, adam_pass: AdamPass) -> None:
        """See `Kernel.run`."""
        if adam_pass.p.numel == 0:
            return
        block = adam_pass.block_size
        chunk = max(1, self._chunk_numel // block) * block
        p, m, v = (as_tensor(a).split(chunk) for a in (adam_pass.p, adam_pass.m, adam_pass.v))
        published = as_tensor(adam_pass.published).split(chunk)
        means = as_tensor(adam_pass.block_means).split(chunk // block)
        grads = [as_tensor(g).split(chunk) for g in adam_pass.grads]
        scales = [as_tensor(each).split(chunk // block) for each in adam_pass.scales or ()]

        def work(i: int) -> None:
            with torch.no_grad():
                newest, new_p = [grad[i] for grad in grads], p[i]
                stored, of_blocks, new_means = (m[i], v[i]), [each[i] for each in scales], means[i]
                if adam_pass.peeks:
                    new_p, new_means = new_p.clone(), new_means.clone()
                    stored, of_blocks = (m[i].clone(), v[i].clone()), [*map(torch.clone, of_blocks)]
                moments = loaded(stored, of_blocks, block)
                _steps(
                    new_p,
                    *moments,
                    newest,
                    adam_pass.steps,
                    adam_pass.first + i * chunk,
                    adam_pass.m.dtype,
                    block,
                )
                store(moments, stored, of_blocks, block)
                block_means_into(moments[1], block, new_means)
                publish_into(adam_pass.publish, new_p, *moments, new_means, block, published[i])

        list(self._pool.map(work, range(len(p))))

    def decode(self, codes: Array, scales: Array, block_size: int, values: Array) -> None:
        """See `Kernel.decode`. In the calling thread."""
        decode(as_tensor(codes), as_tensor(scales), block_size, as_tensor(values))

    def run_lion(self, lion_pass: LionPass) -> None:
        """See `Kernel.run_lion`."""
        if lion_pass.p.numel == 0:
            return
        block = lion_pass.block_size
        chunk = max(1, self._chunk_numel // block) * block
        p, m, published = (
            as_tensor(a).split(chunk) for a in (lion_pass.p, lion_pass.m, lion_pass.published)
        )
        known = (
            as_tensor(lion_pass.known)
            .view(-1, LION_STATE.per_block_width(block))
            .split(chunk // block)
        )
        grads = [as_tensor(g).split(chunk) for g in lion_pass.grads]

        def work(i: int) -> None:
            with torch.no_grad():
                kept = p[i], m[i], known[i]
                new_p, new_m, new_known = map(torch.clone, kept) if lion_pass.peeks else kept
                for step, grad in zip(lion_pass.steps, grads, strict=True):
                    _step_lion(step, grad[i].float(), new_p, new_m)
                published[i].copy_(new_p * lion_pass.publish.p_factor)
                known_into(new_m, block, new_known)

        list(self._pool.map(work, range(len(p))))


def _undivided_threads(number: int) -> ThreadPoolExecutor:
    """A pool of `number` running threads, in each of which torch does not split operations.

    OpenMP keeps the limit per thread, but `torch.set_num_threads` also sets the default for future
    threads and MKL's limit. So the old number is restored once every thread of the pool has set its
    limit.
    """
    before = torch.get_num_threads()
    all_limited = threading.Barrier(number + 1, timeout=_START_SECONDS)

    def take_limit() -> None:
        # a thread's first call resets its limit to the default, and would undo the next line later
        torch.get_num_threads()
        torch.set_num_threads(1)
        all_limited.wait()

    pool = ThreadPoolExecutor(number, thread_name_prefix="dsext-pass", initializer=take_limit)
    try:
        # no thread is idle before all pass the barrier, so each call starts a new one
        for _ in range(number):
            pool.submit(int)
        all_limited.wait()
    except RuntimeError:
        # a thread cannot start, or its initializer failed; release those that wait at the barrier
        all_limited.abort()
        raise
    finally:
        torch.set_num_threads(before)
    return pool


def _elements(of_blocks: torch.Tensor, block: int, numel: int) -> torch.Tensor:
    """Repeat each block's value for each of its elements; the last block may be shorter."""
    return of_blocks.repeat_interleave(block)[:numel]


def _denominator(v: torch.Tensor, bias_correction2_sqrt: float, eps: float) -> torch.Tensor:
    return v.sqrt().div_(bias_correction2_sqrt).add_(eps)


@torch.no_grad()
def take_steps(
    p: torch.Tensor,
    m: torch.Tensor,
    v: torch.Tensor,
    grads: Sequence[torch.Tensor],
    steps: Sequence[AdamStep],
    first: int,
    dtype: str,
    block_size: int,
) -> None:
    """Take the steps of an `AdamPass` without publishing, in the calling thread.

    Args:
        p, m, v: part of a partition, changed in place; 1-D [n], host. p is fp32; the moments are
            fp32, or bfloat16 if that is `dtype`.
        grads: one for each step; 1-D [n], any float dtype, host.
        steps: their constants.
        first: number of the part's first element in its partition, where a block begins.
        dtype: what each step rounds the moments to: ``float32``, ``bfloat16`` or ``int8``.
        block_size: elements per block.
    """
    chunk = max(1, _CHUNK_NUMEL // block_size) * block_size
    parts = [array.split(chunk) for array in (p, m, v, *grads)]
    for i, (p_part, m_part, v_part, *grad_parts) in enumerate(zip(*parts, strict=True)):
        stored = m_part, v_part
        moments = loaded(stored, (), block_size)
        _steps(p_part, *moments, grad_parts, steps, first + i * chunk, dtype, block_size)
        store(moments, stored, (), block_size)


def _steps(
    p: torch.Tensor,
    m: torch.Tensor,
    v: torch.Tensor,
    grads: Sequence[torch.Tensor],
    steps: Sequence[AdamStep],
    first: int,
    dtype: str,
    block_size: int,
) -> None:
    """As `take_steps`, of one chunk, whose m and v are fp32."""
    for step, grad in zip(steps, grads, strict=True):
        _moments(step, grad.float() * step.grad_scale, p, m, v)
        round_moments(m, v, dtype, block_size, step.step, first)
        _update(step, p, m, v)


def _update(step: AdamStep, p: torch.Tensor, m: torch.Tensor, v: torch.Tensor) -> None:
    p.addcdiv_(
        m,
        _denominator(v, step.bias_correction2_sqrt, step.eps),
        value=-step.lr / step.bias_correction1,
    )


def _moments(
    step: AdamStep, grad: torch.Tensor, p: torch.Tensor, m: torch.Tensor, v: torch.Tensor
) -> None:
    """The part of a step before the update: weight decay and moments. Overwrites `grad`."""
    if step.decoupled:
        p.mul_(1.0 - step.lr * step.weight_decay)
    elif step.weight_decay:
        grad.add_(p, alpha=step.weight_decay)
    m.lerp_(grad, 1.0 - step.beta1)
    v.mul_(step.beta2).addcmul_(grad, grad, value=1.0 - step.beta2)


def publish_into(
    publish: Publish,
    p: torch.Tensor,
    m: torch.Tensor,
    v: torch.Tensor,
    means: torch.Tensor,
    block: int,
    out: torch.Tensor,
) -> None:
    """Compute y of the contract; all tensors are 1-D, `means` of blocks, and the last block may be
    shorter."""
    y = p * publish.p_factor
    if publish.m_factor:
        y.sub_(
            (m * publish.m_factor).div_(_denominator(v, publish.bias_correction2_sqrt, publish.eps))
        )
    if publish.l2_factor:
        of_blocks = _denominator(means, publish.bias_correction2_sqrt, publish.eps)
        l2_term = (p * publish.l2_factor).div_(_elements(of_blocks, block, p.numel()))
        y.sub_(l2_term.clamp_(-publish.l2_bound, publish.l2_bound))
    out.copy_(y)


def block_means_into(v: torch.Tensor, block: int, out: torch.Tensor) -> None:
    """Compute the mean of each block of `v`, 1-D; the last block may be shorter."""
    whole = v.numel() // block
    torch.mean(v[: whole * block].view(whole, block), dim=1, out=out[:whole])
    if whole < out.numel():
        out[whole] = v[whole * block :].mean()


def _step_lion(step: LionStep, grad: torch.Tensor, p: torch.Tensor, m: torch.Tensor) -> None:
    """A step of `lion_pass`. fp64 holds a product of two fp32 numbers, so each sum is rounded as if
    it were fused."""
    first, second = step.complements
    grad = (grad * step.grad_scale).double()
    direction = (m * step.beta1).double().add_(grad, alpha=first)
    update = torch.full_like(p, step.lr).copysign_(direction)
    p.copy_((p.double() * step.decay).sub_(update))
    m.copy_((m * step.beta2).double().add_(grad, alpha=second))


def known_into(m: torch.Tensor, block: int, out: torch.Tensor) -> None:
    """Compute `known` of `lion_pass` for `m`, 1-D; the last block may be shorter.

    Args:
        m: 1-D fp32 [n].
        block: elements per block.
        out: int32 [blocks, ``LION_STATE.per_block_width(block)``].
    """
    block_means_into(m.abs(), block, out[:, 0].view(torch.float32))
    padded = torch.nn.functional.pad(m.signbit(), (0, len(out) * block - m.numel())).view(
        len(out), block
    )
    words = torch.nn.functional.pad(padded, (0, -block % 32)).view(len(out), -1, 32).long()
    out[:, 1:] = (words << torch.arange(32, device="cpu", dtype=torch.int64)).sum(2).to(torch.int32)
