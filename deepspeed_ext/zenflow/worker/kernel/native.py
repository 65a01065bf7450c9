"""Calls the C++ passes (``*.cpp``) through ctypes. Does not import torch, which keeps the worker
small."""

import ctypes
import os
from collections.abc import Sequence
from typing import Any

from deepspeed_ext.zenflow.worker.kernel.adam_pass import AdamPass, AdamStep, Array
from deepspeed_ext.zenflow.worker.kernel.lion_pass import LionPass, LionStep
from deepspeed_ext.zenflow.worker.kernel.rounding import WORD, rounding_key

__all__ = ["DTYPE_CODES", "NativeKernel", "open_library"]

ABI_VERSION = 17
DTYPE_CODES = {"float32": 0, "bfloat16": 1, "float16": 2, "int8": 3}


class _Step(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_float)
        for name in (
            "beta1_complement",
            "beta2",
            "beta2_complement",
            "eps",
            "decay",
            "l2",
            "step_size",
            "bias2_inverse",
            "grad_scale",
        )
    ] + [("rounding_key", ctypes.c_uint32)]


class _Pass(ctypes.Structure):
    _fields_ = [
        ("p", ctypes.c_void_p),
        ("m", ctypes.c_void_p),
        ("v", ctypes.c_void_p),
        ("grads", ctypes.POINTER(ctypes.c_void_p)),
        ("steps", ctypes.POINTER(_Step)),
        ("published", ctypes.c_void_p),
        ("block_means", ctypes.c_void_p),
        ("numel", ctypes.c_int64),
        ("block_size", ctypes.c_int64),
        ("steps_count", ctypes.c_int32),
        ("grad_dtype", ctypes.c_int32),
        ("published_dtype", ctypes.c_int32),
        ("threads", ctypes.c_int32),
        ("p_factor", ctypes.c_float),
        ("m_factor", ctypes.c_float),
        ("l2_factor", ctypes.c_float),
        ("l2_bound", ctypes.c_float),
        ("publish_bias2_inverse", ctypes.c_float),
        ("publish_eps", ctypes.c_float),
        ("moment_dtype", ctypes.c_int32),
        ("first", ctypes.c_uint32),
        ("m_scales", ctypes.c_void_p),
        ("v_scales", ctypes.c_void_p),
        ("vectors", ctypes.c_int32),
        ("peeks", ctypes.c_int32),
    ]


class _LionStep(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_float)
        for name in (
            "beta1",
            "beta1_complement",
            "beta2",
            "beta2_complement",
            "decay",
            "lr",
            "grad_scale",
        )
    ]


class _LionPass(ctypes.Structure):
    _fields_ = [
        ("p", ctypes.c_void_p),
        ("m", ctypes.c_void_p),
        ("grads", ctypes.POINTER(ctypes.c_void_p)),
        ("steps", ctypes.POINTER(_LionStep)),
        ("published", ctypes.c_void_p),
        ("known", ctypes.c_void_p),
        ("numel", ctypes.c_int64),
        ("block_size", ctypes.c_int64),
        ("steps_count", ctypes.c_int32),
        ("grad_dtype", ctypes.c_int32),
        ("published_dtype", ctypes.c_int32),
        ("threads", ctypes.c_int32),
        ("p_factor", ctypes.c_float),
        ("zero", ctypes.c_uint32),
        ("peeks", ctypes.c_int32),
    ]


def open_library(path: str) -> ctypes.CDLL:
    """Load the library.

    Raises:
        OSError: the file cannot be loaded, or has another version.
    """
    library = ctypes.CDLL(path)
    if library.dsext_adam_pass_version() != ABI_VERSION:
        raise OSError(f"{path} does not have ABI version {ABI_VERSION}: rebuild the native kernel")
    signatures = {
        "dsext_adam_pass": [ctypes.POINTER(_Pass)],
        "dsext_lion_pass": [ctypes.POINTER(_LionPass)],
        "dsext_decode": [
            ctypes.c_void_p,
            ctypes.c_void_p,
            ctypes.c_void_p,
            ctypes.c_int64,
            ctypes.c_int64,
            ctypes.c_int32,
        ],
        "dsext_predict": [ctypes.c_void_p],
        "dsext_first_touch": [
            ctypes.c_void_p,
            *[ctypes.c_int64] * 4,
            ctypes.c_int32,
            ctypes.POINTER(ctypes.c_int32),
        ],
        "dsext_passers": [
            ctypes.POINTER(ctypes.c_int32),
            ctypes.c_int64,
            ctypes.c_int64,
            ctypes.c_int32,
        ],
        "dsext_thread_ids": [ctypes.POINTER(ctypes.c_int32), ctypes.c_int32],
    }
    for name, arguments in signatures.items():
        function = getattr(library, name)
        function.argtypes, function.restype = arguments, None
    return library


def _addresses(arrays: tuple[Array, ...]) -> ctypes.Array[ctypes.c_void_p]:
    return (ctypes.c_void_p * max(1, len(arrays)))(*(array.address for array in arrays))


def _dtype_code(arrays: tuple[Array, ...]) -> int:
    return DTYPE_CODES[arrays[0].dtype] if arrays else 0


def _step(step: AdamStep) -> _Step:
    return _Step(
        beta1_complement=1.0 - step.beta1,
        beta2=step.beta2,
        beta2_complement=1.0 - step.beta2,
        eps=step.eps,
        decay=1.0 - step.lr * step.weight_decay if step.decoupled else 1.0,
        l2=0.0 if step.decoupled else step.weight_decay,
        step_size=step.lr / step.bias_correction1,
        bias2_inverse=1.0 / step.bias_correction2_sqrt,
        grad_scale=step.grad_scale,
        rounding_key=rounding_key(step.step),
    )


def _lion_step(step: LionStep) -> _LionStep:
    beta1_complement, beta2_complement = step.complements
    return _LionStep(
        beta1=step.beta1,
        beta1_complement=beta1_complement,
        beta2=step.beta2,
        beta2_complement=beta2_complement,
        decay=step.decay,
        lr=step.lr,
        grad_scale=step.grad_scale,
    )


class NativeKernel:
    """Runs passes with the shared library at ``library``, on ``threads`` threads: the caller's, and
    others that the library starts at the first pass and keeps.

    Args:
        vectors: whether Adam's passes may use AVX-512 if the CPU has it; results are bitwise the
            same.

    Raises:
        OSError: the file cannot be loaded, or has another version.
    """

    name = "native"

    def __init__(self, library: str, threads: int, vectors: bool = True) -> None:
        self._library = open_library(library)
        self._threads = self._most = threads
        self._vectors = vectors

    def limit(self, threads: int) -> None:
        """Let later passes run on the first `threads` threads only; results are the same."""
        self._threads = max(1, min(threads, self._most))

    def run(self, adam_pass: AdamPass) -> None:
        """See `Kernel.run`. The call releases the interpreter lock."""
        count = len(adam_pass.steps)
        steps = (_Step * max(1, count))(*map(_step, adam_pass.steps))
        publish = adam_pass.publish
        self._library.dsext_adam_pass(
            _Pass(
                p=adam_pass.p.address,
                m=adam_pass.m.address,
                v=adam_pass.v.address,
                grads=_addresses(adam_pass.grads),
                steps=steps,
                published=adam_pass.published.address,
                block_means=adam_pass.block_means.address,
                numel=adam_pass.p.numel,
                block_size=adam_pass.block_size,
                steps_count=count,
                grad_dtype=_dtype_code(adam_pass.grads),
                published_dtype=DTYPE_CODES[adam_pass.published.dtype],
                threads=self._threads,
                p_factor=publish.p_factor,
                m_factor=publish.m_factor,
                l2_factor=publish.l2_factor,
                l2_bound=publish.l2_bound,
                publish_bias2_inverse=1.0 / publish.bias_correction2_sqrt,
                publish_eps=publish.eps,
                moment_dtype=DTYPE_CODES[adam_pass.m.dtype],
                first=adam_pass.first & WORD,
                m_scales=None if adam_pass.scales is None else adam_pass.scales[0].address,
                v_scales=None if adam_pass.scales is None else adam_pass.scales[1].address,
                vectors=self._vectors,
                peeks=adam_pass.peeks,
            )
        )

    def decode(self, codes: Array, scales: Array, block_size: int, values: Array) -> None:
        """See `Kernel.decode`. On the calling thread alone, without the interpreter lock."""
        self._library.dsext_decode(
            codes.address,
            scales.address,
            values.address,
            codes.numel,
            block_size,
            codes.dtype == "uint8",
        )

    def run_lion(self, lion_pass: LionPass) -> None:
        """See `Kernel.run_lion`. The call releases the interpreter lock."""
        count = len(lion_pass.steps)
        self._library.dsext_lion_pass(
            _LionPass(
                p=lion_pass.p.address,
                m=lion_pass.m.address,
                grads=_addresses(lion_pass.grads),
                steps=(_LionStep * max(1, count))(*map(_lion_step, lion_pass.steps)),
                published=lion_pass.published.address,
                known=lion_pass.known.address,
                numel=lion_pass.p.numel,
                block_size=lion_pass.block_size,
                steps_count=count,
                grad_dtype=_dtype_code(lion_pass.grads),
                published_dtype=DTYPE_CODES[lion_pass.published.dtype],
                threads=self._threads,
                p_factor=lion_pass.publish.p_factor,
                peeks=lion_pass.peeks,
            )
        )

    def first_touch(
        self,
        address: int,
        nbytes: int,
        *,
        block_bytes: int = 1,
        block_size: int = 1,
        blocks_per_chunk: int | None = None,
        touchers: Any = None,
    ) -> None:
        """Touch every page of an array on the thread that will process it, which places the page on
        that thread's memory node.

        Args:
            block_bytes: bytes of the array for one block.
            block_size: elements of a block.
            blocks_per_chunk: blocks of a pass; None: one pass goes over all.
            touchers: ctypes int32 array that receives the thread id for each page; None: not
                wanted.
        """
        most = max(1, -(-nbytes // block_bytes))
        blocks = min(blocks_per_chunk or most, most)
        self._library.dsext_first_touch(
            address, nbytes, block_bytes, block_size, blocks, self._threads, touchers
        )

    def passers(self, numel: int, block_size: int) -> list[int]:
        """For each of `numel` elements, the id of the thread on which a pass processes it."""
        found = (ctypes.c_int32 * numel)()
        self._library.dsext_passers(found, numel, block_size, self._threads)
        return list(found)

    def pin(self, cpus: Sequence[int]) -> None:
        """Bind each thread to one of ``cpus``, in order; the calling thread to the first. If a
        limit allows fewer threads, the calling thread does the work of the missing ones, too, on
        its own CPU.

        Raises:
            OSError: the system refuses it.
        """
        numbers = (ctypes.c_int32 * self._threads)()
        self._library.dsext_thread_ids(numbers, self._threads)
        first: dict[int, int] = {}
        for number, cpu in zip(numbers, cpus, strict=False):
            first.setdefault(number, cpu)
        for number, cpu in first.items():
            os.sched_setaffinity(number, {cpu})
