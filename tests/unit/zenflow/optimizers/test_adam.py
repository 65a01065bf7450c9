"""What the worker takes over of a user's Adam: the way of its weight decay, and the sign of its
steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from deepspeed_ext.zenflow.optimizers.adam import AdamKind


@pytest.mark.parametrize(
    ("kind", "decoupled"), [(torch.optim.Adam, False), (torch.optim.AdamW, True)]
)
@pytest.mark.parametrize("says_so", [True, False], ids=["torch", "older torch"])
def test_weight_decay_is_that_of_torchs_class(kind: Any, decoupled: bool, says_so: bool) -> None:
    """The defaults of an older torch's Adam do not say it. A wrong guess would train another
    model."""
    optimizer = kind([torch.nn.Parameter(torch.zeros(1))], lr=1e-3)
    if not says_so:
        optimizer.defaults.pop("decoupled_weight_decay", None)
    assert AdamKind(optimizer).is_decoupled is decoupled


@pytest.mark.parametrize(
    ("given", "grad_scale"), [({}, 0.5), ({"maximize": False}, 0.5), ({"maximize": True}, -0.5)]
)
def test_a_group_that_is_maximized_steps_up_its_gradient(
    given: dict[str, bool], grad_scale: float
) -> None:
    hosted = AdamKind(
        torch.optim.AdamW([{"params": [torch.nn.Parameter(torch.zeros(1))], **given}], lr=1e-3)
    )
    assert hosted.step(0, 1, 0.5).grad_scale == grad_scale
