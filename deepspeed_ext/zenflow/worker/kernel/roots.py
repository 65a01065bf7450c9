"""The square root that is the same on every device."""

import numpy as np
import torch

__all__ = ["root"]

# Note: [the nearest root]
# On the CPU torch's sqrt is MKL's, of which one result in 170 is not the nearest number; in fp64,
# too. CUDA's is the nearest, Triton's sqrt_rn as well, and NumPy's: it is the CPU's instruction.


def root(x: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """The nearest fp32 number to each square root, on any device; see Note: [the nearest root].

    Args:
        x: fp32, any shape. A negative element gives NaN.
        out: what is written and returned, of the same shape on the same device; may be `x`. None: a
            new tensor.
    """
    out = torch.empty_like(x) if out is None else out
    if x.device.type != "cpu":
        return torch.sqrt(x, out=out)
    with np.errstate(invalid="ignore"):
        np.sqrt(x.numpy(), out=out.numpy())
    return out
