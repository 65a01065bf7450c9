"""Defines the pass of Adam and AdamW: its constants and arithmetic. Plain values, no torch.

Adam and AdamW as in ``torch.optim`` (Kingma and Ba, 2015; Loshchilov and Hutter, 2019). A step
computes, elementwise in fp32::

    g = c * gradient                    (+ weight_decay * p, unless decoupled)
    m = m + (1 - beta1) (g - m)
    v = beta2 v + (1 - beta2) g^2
    d = sqrt(v) / sqrt(1 - beta2^t) + eps
    p = (1 - lr weight_decay) p - lr / (1 - beta1^t) m / d      (first factor only if decoupled)

Without bias correction, both 1 - beta^t are 1. A negative c maximizes. If m and v have 16 or 8
bits, the step rounds them (see `rounding`) before it computes d and p. The order of roundings is
the compiler's in the native library, for its speed, and `definition`'s elsewhere.

After it, with that step's d and the values of `Publish`::

    block_means[b] = mean of v over block b, and d_b is d with it
    y = p_factor p - m_factor m / d - clamp(l2_factor p / d_b, -l2_bound, l2_bound)
"""

import ctypes
import math
from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING, ClassVar

from deepspeed_ext.zenflow.worker.kernel.passes import (
    DTYPE_CODES,
    Arguments,
    Pass,
    Passes,
    StateLayout,
)
from deepspeed_ext.zenflow.worker.kernel.rounding import WORD, rounding_key

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

__all__ = ["ADAM_STATE", "AdamConstants", "AdamPasses", "AdamStep", "Publish"]


def _single(value: float) -> float:
    """`value` rounded to fp32."""
    return ctypes.c_float(value).value


@dataclass(frozen=True, slots=True)
class AdamStep:
    """The constants of one optimizer step."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    decoupled: bool
    """True: AdamW. False: Adam with weight decay as an L2 term in the gradient."""
    step: int
    """Number of this update, from 1 (``t`` of the bias correction)."""
    grad_scale: float
    """``c``: factor of the stored gradient (loss scale and clipping); negative where the gradient
    is maximized."""
    bias_correction: bool = True
    """False: the moments are used as they are."""

    @property
    def _correction_betas(self) -> tuple[float, float]:
        """The betas of the bias corrections; zeros, which make them 1, if there are none."""
        return (self.beta1, self.beta2) if self.bias_correction else (0.0, 0.0)

    @property
    def bias_correction1(self) -> float:
        """1 - beta1^t, or 1."""
        return 1.0 - self._correction_betas[0] ** self.step

    @property
    def bias_correction2_sqrt(self) -> float:
        """sqrt(1 - beta2^t), or 1."""
        return math.sqrt(1.0 - self._correction_betas[1] ** self.step)

    @property
    def l2(self) -> float:
        """Weight decay that is added to the gradient; 0: none."""
        return 0.0 if self.decoupled else self.weight_decay

    @property
    def decay(self) -> float:
        """Factor of p under decoupled weight decay; 1: none."""
        return 1.0 - self.lr * self.weight_decay if self.decoupled else 1.0

    @property
    def corrections(self) -> tuple[float, float]:
        """Both bias corrections in fp32. By expm1: for small exponents, the subtraction would lose
        digits to cancellation."""
        first, second = (
            _single(-math.expm1(self.step * math.log(beta))) if beta else 1.0
            for beta in self._correction_betas
        )
        return first, _single(math.sqrt(second))


@dataclass(frozen=True, slots=True)
class AdamConstants:
    """The numbers of a step in the order in which the device's kernel takes them. `correction1` and
    `correction2_sqrt` are `AdamStep.corrections`."""

    correction1: float
    correction2_sqrt: float
    grad_scale: float
    lr: float
    beta1: float
    weight1: float
    beta2: float
    weight2: float
    eps: float
    l2: float
    decay: float

    @classmethod
    def of(cls, step: AdamStep) -> "AdamConstants":
        """The numbers of `step`."""
        betas = step.beta1, 1.0 - step.beta1, step.beta2, 1.0 - step.beta2
        return cls(
            *step.corrections, step.grad_scale, step.lr, *betas, step.eps, step.l2, step.decay
        )


@dataclass(frozen=True, slots=True)
class Publish:
    """The coefficients that compute y from p, m and v."""

    p_factor: float
    m_factor: float
    l2_factor: float
    l2_bound: float
    """Bound of the term with `l2_factor`: it estimates L2 terms with the block's d and must be
    clamped."""
    bias_correction2_sqrt: float
    """sqrt(1 - beta2^t) of the step after which y is published; 1.0 before the first step or
    without bias correction."""
    eps: float

    @classmethod
    def exact(cls, bias_correction2_sqrt: float, eps: float) -> "Publish":
        """Coefficients that publish p itself."""
        return cls(1.0, 0.0, 0.0, 0.0, bias_correction2_sqrt, eps)


_STEP = (
    *("beta1_complement", "beta2", "beta2_complement", "eps", "decay", "l2", "step_size"),
    *("bias2_inverse", "grad_scale"),
)
_PUBLISH = ("p_factor", "m_factor", "l2_factor", "l2_bound", "publish_bias2_inverse", "publish_eps")


class _Arguments(Arguments):
    """``AdamPass`` of adam_pass.h."""

    _fields_: ClassVar = [
        *((name, ctypes.c_void_p) for name in ("m", "v", "m_scales", "v_scales")),
        ("moment_dtype", ctypes.c_int32),
        ("first", ctypes.c_uint32),
        *((name, ctypes.c_float) for name in _STEP),
        ("rounding_key", ctypes.c_uint32),
        *((name, ctypes.c_float) for name in _PUBLISH),
    ]


class AdamPasses(Passes):
    """The arithmetic of the module docstring."""

    step_type = AdamStep
    function = "dsext_adam_pass"

    @staticmethod
    def arguments(work: Pass) -> Arguments:
        publish: Publish = work.publish
        assert work.step is None or (publish.bias_correction2_sqrt, publish.eps) == (
            work.step.bias_correction2_sqrt,
            work.step.eps,
        )
        assert not work.peeks or publish.l2_factor == 0.0
        found = _Arguments(
            moment_dtype=DTYPE_CODES[work.state[1].dtype],
            first=work.first & WORD,
            **dict(zip(_PUBLISH[:4], astuple(publish)[:4], strict=True)),
            publish_bias2_inverse=1.0 / publish.bias_correction2_sqrt,
            publish_eps=publish.eps,
        )
        for name, array in zip(work.layout.kept[1:], work.state[1:], strict=True):
            setattr(found, name, array.address)
        if (step := work.step) is not None:
            found.beta1_complement, found.beta2 = 1.0 - step.beta1, step.beta2
            found.beta2_complement, found.eps = 1.0 - step.beta2, step.eps
            found.decay, found.l2 = step.decay, step.l2
            found.step_size = step.lr / step.bias_correction1
            found.bias2_inverse = 1.0 / step.bias_correction2_sqrt
            found.grad_scale, found.rounding_key = step.grad_scale, rounding_key(step.step)
        return found

    @staticmethod
    def take_step(
        state: "Sequence[torch.Tensor]",
        grad: "torch.Tensor",
        step: AdamStep,
        block_size: int,
        first: int = 0,
    ) -> None:
        from deepspeed_ext.zenflow.worker.kernel.definition import adam_step

        adam_step(state, grad, step, block_size, first)

    @staticmethod
    def publish(
        publish: Publish,
        state: "Sequence[torch.Tensor]",
        block_size: int,
        published: "torch.Tensor",
        per_block: "torch.Tensor | None",
    ) -> None:
        from deepspeed_ext.zenflow.worker.kernel.definition import publish_adam

        publish_adam(publish, state, block_size, published, per_block)


ADAM_STATE = StateLayout(
    "adam", (("m", "exp_avg"), ("v", "exp_avg_sq")), ("block_means", "float32"), AdamPasses
)
