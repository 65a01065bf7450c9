"""Handles reduced gradients before a step, for the ZeRO subclasses: their norms, and their copies
to the host.

With ``gradients_on_host``, and with weights on the host, gradients wait for their step in host
memory. Every parameter's gradient has its place in the ring slot of its partition, so nothing is
copied when the step begins: the host computes the weights from the slot, and the worker reads it,
too. If micro-steps are summed in another dtype than that of the slots, the sums have their own
buffer. DeepSpeed treats these gradients as those of its own CPU offload: it neither keeps nor
flattens them on the accelerator, and takes norms that were computed during backward.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._foreach_utils import _device_has_foreach_support

from deepspeed_ext.adapter.upstream import counted_alike, norm_dtype
from deepspeed_ext.runtime.backend import get_accelerator
from deepspeed_ext.zenflow.worker.messages import Span

_ROW = 512
_ROWS_ON_CPU = 2048


def l2_norm(tensor: torch.Tensor) -> torch.Tensor:
    """The Euclidean norm in one pass: norms of rows in fp32, then the norm of those in fp64.

    Rows are short, so the result is as exact as with fp64 throughout, up to the last bits of fp32.
    An accelerator without fp64 uses fp32 for both.

    Args:
        tensor: any shape, float dtype and device.

    Returns:
        1-D, one element, fp64 (or fp32), on the same device. Infinite if an element is infinite or
        exceeds 1e19 in magnitude; NaN if an element is NaN.
    """
    flat, exact = tensor.detach().reshape(-1), norm_dtype()
    if not (whole := flat.numel() // _ROW * _ROW):
        return torch.linalg.vector_norm(flat, dtype=torch.float32).to(exact).view(1)
    rows = flat[:whole].view(-1, _ROW)
    # On the CPU torch converts 16-bit input before it
    # reduces; pieces keep the converted copy in the cache.
    pieces = rows.split(_ROWS_ON_CPU) if flat.device.type == "cpu" else (rows,)
    norms = [torch.linalg.vector_norm(piece, dim=1, dtype=torch.float32) for piece in pieces]
    norms.append(torch.linalg.vector_norm(flat[whole:], dtype=torch.float32).view(1))
    return torch.linalg.vector_norm(torch.cat(norms).to(exact)).view(1)


def fused_l2_norms(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The norms, 0-D fp64, of many tensors of any shapes and float dtypes on one device, which
    converts and sums as it reads. A few hundred tensors of one dtype take two launches."""
    norms: dict[int, torch.Tensor] = {}
    # one dtype at a time: mixed dtypes are not fused
    for dtype in {tensor.dtype for tensor in tensors}:
        indices = [index for index, tensor in enumerate(tensors) if tensor.dtype == dtype]
        same = [tensors[index].detach() for index in indices]
        norms.update(zip(indices, torch._foreach_norm(same, 2, dtype=torch.float64), strict=True))
    return [norms[index] for index in range(len(tensors))]


def norm_tensors(gradients: Sequence[torch.Tensor], params: Sequence[Any]) -> list[torch.Tensor]:
    """One-element tensors with the same norms as `gradients`, so that DeepSpeed computes the total
    norm from them cheaply.

    Args:
        gradients: any shapes; zero padding that DeepSpeed has marked may be among them.
        params: the parameters of the gradients that are not padding, in order.

    Returns:
        Usually one tensor per gradient, with padding passed through. If the accelerator fuses the
        norms, padding is dropped; if DeepSpeed would also count all parameters in the same way, a
        single tensor replaces all gradients, which saves DeepSpeed's own launches.
    """
    real = [grad for grad in gradients if not getattr(grad, "_zero_padding", False)]
    if not real or not _fuses(real[0].device):
        return [
            grad if getattr(grad, "_zero_padding", False) else l2_norm(grad) for grad in gradients
        ]
    # the fused norm of an empty tensor is undefined on an accelerator
    full = [grad for grad in real if grad.numel()]
    norms = fused_l2_norms(full)
    if counted_alike(params) and full:
        return [_of_all(norms)]
    left = iter(norms)
    return [next(left).view(1) if grad.numel() else l2_norm(grad) for grad in real]


def gradient_norm(gradient: torch.Tensor) -> torch.Tensor:
    """The norm that `norm_tensors` finds for one gradient: 1-D, one element, on its device."""
    is_fused = gradient.numel() > 0 and _fuses(gradient.device)
    return fused_l2_norms([gradient])[0].view(1) if is_fused else l2_norm(gradient)


def known_norm_tensors(norms: Sequence[torch.Tensor], params: Sequence[Any]) -> list[torch.Tensor]:
    """What `norm_tensors` returns for the gradients of `params` whose `norms`, 1-D of one element
    on the accelerator, `gradient_norm` has found."""
    return (
        [_of_all(norms)]
        if norms and _fuses(norms[0].device) and counted_alike(params)
        else list(norms)
    )


def _of_all(norms: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.linalg.vector_norm(torch.stack([norm.view(()) for norm in norms])).view(1)


def _fuses(device: torch.device) -> bool:
    """Whether `fused_l2_norms` is fused on `device`; otherwise it loops and makes an fp64 copy of
    each gradient."""
    is_accelerator = device.type != "cpu"
    return is_accelerator and _device_has_foreach_support(device) and norm_dtype() is torch.float64


@dataclass(frozen=True)
class Extent:
    """The elements of a parameter's gradient in a partition, and the first one in the buffer of
    sums, which holds all partitions."""

    partition: int
    begin: int
    end: int
    offset: int


class HostGradients:
    """The gradients of the next step on the host, from its first micro-step to its end.

    Args:
        places: of all trained parameters, by id.
        slot: returns the slot of a partition's next gradient, 1-D, host, of which the worker has
            read the last gradient of a span.
        sums: buffer of sums, 1-D, host; None: gradients are summed in the slots.
        norm: computes the norm of a tensor on its device.

    Attributes:
        norms: norm of each complete gradient, by id.
    """

    def __init__(
        self,
        places: Mapping[int, Extent],
        slot: Callable[[int, Span], torch.Tensor],
        sums: torch.Tensor | None,
        norm: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        self._places, self._slot, self._sums, self._norm = places, slot, sums, norm
        self._stream: Any = None
        self.forget()

    def forget(self) -> None:
        """Discard all gradients, for instance after a step."""
        self.norms: dict[int, torch.Tensor] = {}
        self._arrived: set[int] = set()
        self._in_slot: set[int] = set()
        self._shown: set[int] = set()

    def take(self, number: int, gradient: torch.Tensor, *, adds: bool, completes: bool) -> None:
        """Start the copy of a micro-step's gradient to the host, on the current stream: this rank's
        part, perhaps without padding. Earlier micro-steps' are kept if it `adds`; the step's last
        `completes` them."""
        sums, slot = (
            part[: gradient.numel()] for part in (self._sum_of(number), self._slot_of(number))
        )
        total = gradient.view(-1).to(sums.dtype)
        if adds and number in self._arrived:
            total = sums.to(gradient.device, non_blocking=True).add_(total)
        sums.copy_(total, non_blocking=True)
        self._arrived.add(number)
        self._in_slot.discard(number)
        self._shown.discard(number)
        if completes:
            if self._sums is not None:
                slot.copy_(total.to(slot.dtype), non_blocking=True)
            self._in_slot.add(number)
            self.norms[number] = self._norm(total)
        self._stream = None if gradient.device.type == "cpu" else get_accelerator().current_stream()

    def finish(self) -> None:
        """Complete all gradients, so that every slot holds its step's, and wait for their copies.
        Parameters that no micro-step has used get zeros."""
        self._wait()
        for number in self._shown:  # may be written; unknown without a buffer of sums
            slot = self._slot_of(number)
            if self._sums is None or not torch.equal(slot, self._sum_of(number).to(slot.dtype)):
                self.changed(number)
        for number in self._places:
            if number not in self._arrived:
                self._slot_of(number).zero_()
            elif number not in self.norms:
                source = self._slot_of(number) if number in self._in_slot else self._sum_of(number)
                self.norms[number] = self._norm(source.to(get_accelerator().current_device_name()))
                self.show(number)

    def show(self, number: int) -> None:
        """Let callers read and write a parameter's gradient in its slot, on the host."""
        self._wait()
        slot, sums = self._slot_of(number), self._sum_of(number)
        if number not in self._arrived:
            slot.zero_()
            sums.zero_()
            self._arrived.add(number)
        elif number not in self._in_slot:
            slot.copy_(sums)
        self._in_slot.add(number)

    def shown(self, number: int) -> torch.Tensor:
        """Like `show`, for callers that may write without calling `changed`; return the gradient, a
        1-D view of its slot."""
        self.show(number)
        self._shown.add(number)
        return self._slot_of(number)

    def changed(self, number: int) -> None:
        """Note that a gradient was written after `show`, so its norm is unknown."""
        self.norms.pop(number, None)

    # Note: [a slot has two readers]
    # The host writes to a slot here, while two streams may still use it: that of the newest
    # gradient's copy, and the current one, which may still copy y from the slot to the weights
    # (Note: [the slot of y]). Neither stream orders host writes, so the host waits for both.

    def _wait(self) -> None:
        """Wait until the host may read and write slots; see Note: [a slot has two readers]."""
        if self._stream is not None:
            self._stream.synchronize()
        if not get_accelerator().is_synchronized_device():
            get_accelerator().current_stream().synchronize()

    def _slot_of(self, number: int) -> torch.Tensor:
        place = self._places[number]
        span = Span(place.begin, place.end)
        return self._slot(place.partition, span)[place.begin : place.end]

    def _sum_of(self, number: int) -> torch.Tensor:
        if self._sums is None:
            return self._slot_of(number)
        place = self._places[number]
        return self._sums[place.offset : place.offset + place.end - place.begin]
