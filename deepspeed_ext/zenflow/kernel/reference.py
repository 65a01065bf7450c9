"""The pass as chunked torch operations: the definition that the native kernel is tested against, and its fallback."""

import ctypes
from concurrent.futures import ThreadPoolExecutor

import torch

from deepspeed_ext.zenflow.kernel.adam_pass import DTYPE_BYTES, AdamPass, AdamStep, Array, Publish

__all__ = ["ReferenceKernel", "as_tensor"]

_CHUNK_NUMEL = 128 * 1024  # three fp32 arrays and the temporaries of a chunk stay in a core's L2 cache


def as_tensor(array: Array) -> torch.Tensor:
    """View ``array`` as a 1-D CPU tensor. The memory must outlive it."""
    buffer = (ctypes.c_char * (array.numel * DTYPE_BYTES[array.dtype])).from_address(array.address)
    return torch.frombuffer(buffer, dtype=getattr(torch, array.dtype), count=array.numel)


class ReferenceKernel:
    """Runs passes with torch on the CPU. Results do not depend on the chunk size: every operation is elementwise,
    and chunks end on block boundaries. Threads take chunks, and operations are not divided among threads, which would
    wait for each other at every one of them."""

    name = "reference"

    def __init__(self, threads: int, chunk_numel: int = _CHUNK_NUMEL) -> None:
        torch.set_num_threads(1)
        self._pool = ThreadPoolExecutor(threads)
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

        def work(i: int) -> None:
            with torch.no_grad():
                for step, grad in zip(adam_pass.steps, grads, strict=True):
                    _step(step, grad[i].float(), p[i], m[i], v[i])
                _publish(adam_pass.publish, p[i], m[i], v[i], published[i])
                _block_means(v[i], block, means[i])

        list(self._pool.map(work, range(len(p))))


def _denominator(v: torch.Tensor, bias_correction2_sqrt: float, eps: float) -> torch.Tensor:
    return v.sqrt().div_(bias_correction2_sqrt).add_(eps)


def _step(step: AdamStep, grad: torch.Tensor, p: torch.Tensor, m: torch.Tensor, v: torch.Tensor) -> None:
    grad = grad * step.grad_scale
    if step.decoupled:
        p.mul_(1.0 - step.lr * step.weight_decay)
    elif step.weight_decay:
        grad.add_(p, alpha=step.weight_decay)
    m.lerp_(grad, 1.0 - step.beta1)
    v.mul_(step.beta2).addcmul_(grad, grad, value=1.0 - step.beta2)
    p.addcdiv_(m, _denominator(v, step.bias_correction2_sqrt, step.eps), value=-step.lr / step.bias_correction1)


def _publish(publish: Publish, p: torch.Tensor, m: torch.Tensor, v: torch.Tensor, out: torch.Tensor) -> None:
    if publish.m_factor == 0.0 and publish.l2_factor == 0.0:
        out.copy_(p * publish.p_factor)
        return
    update = m * publish.m_factor
    if publish.l2_factor:
        update.add_(p, alpha=publish.l2_factor)
    out.copy_((p * publish.p_factor).sub_(update.div_(_denominator(v, publish.bias_correction2_sqrt, publish.eps))))


def _block_means(v: torch.Tensor, block: int, out: torch.Tensor) -> None:
    whole = v.numel() // block
    torch.mean(v[: whole * block].view(whole, block), dim=1, out=out[:whole])
    if whole < out.numel():
        out[whole] = v[whole * block :].mean()
