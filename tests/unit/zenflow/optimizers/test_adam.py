"""Which way of weight decay a user's Adam has."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from deepspeed_ext.zenflow.optimizers.adam import require_adam


@pytest.mark.parametrize(("kind", "decoupled"), [(torch.optim.Adam, False), (torch.optim.AdamW, True)])
@pytest.mark.parametrize("says_so", [True, False], ids=["torch", "older torch"])
def test_weight_decay_is_that_of_torchs_class(kind: Any, decoupled: bool, says_so: bool) -> None:
    """The defaults of an older torch's Adam do not say it. A wrong guess would train another model."""
    optimizer = kind([torch.nn.Parameter(torch.zeros(1))], lr=1e-3)
    if not says_so:
        optimizer.defaults.pop("decoupled_weight_decay", None)
    assert require_adam(optimizer) is decoupled
