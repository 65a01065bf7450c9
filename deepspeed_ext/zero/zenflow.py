"""What the ZenFlow subclasses of both optimizers share.

DeepSpeed's step, with the optimizer not offloaded, does: reduced gradients -> one flat gradient -> unscale and clip ->
`_optimizer_step` on the fp32 partition -> copy it into the 16-bit partition -> all-gather. That is the order we need,
except that the fp32 partition is the worker's. So for the length of a step each fp32 partition is replaced by a
`PartitionStandIn`: it takes the flat gradient in 16 bit and has the 16-bit partition as its data, which
`OffloadedAdam` writes. No method body of DeepSpeed's is repeated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from deepspeed_ext._agreement import RankGroup
from deepspeed_ext._errors import ConfigError
from deepspeed_ext._upstream import get_accelerator, local_world_size
from deepspeed_ext.affinity.worker import WorkerPlace
from deepspeed_ext.config import ZenFlowConfig
from deepspeed_ext.zenflow import checkpoint
from deepspeed_ext.zenflow.offloaded_adam import GradFactor, OffloadedAdam
from deepspeed_ext.zenflow.predictive import PredictiveAdam
from deepspeed_ext.zenflow.seat import planned_seat, unplanned_seat
from deepspeed_ext.zenflow.selective import SelectiveAdam

__all__ = ["PartitionStandIn", "StepFactor", "build_adam", "grad_dtype", "require_supported", "streaming"]


class PartitionStandIn:
    """Stands in for an fp32 partition while DeepSpeed steps.

    Attributes:
        data: the 16-bit partition, 1-D.
        dtype: what DeepSpeed is to convert the flat gradient to.
        grad: the flat gradient, 1-D.
    """

    def __init__(self, data: torch.Tensor, dtype: torch.dtype) -> None:
        self.data = data
        self.dtype = dtype
        self.grad: torch.Tensor | None = None

    def numel(self) -> int:
        """Elements of the partition."""
        return self.data.numel()


class StepFactor:
    """The factor of one step's gradients, found by letting DeepSpeed unscale and clip a one."""

    def __init__(self) -> None:
        self._factor: GradFactor | None = None

    def get(self, unscale_and_clip: Callable[[torch.Tensor], None], loss_scale: float) -> GradFactor:
        """The step's factor; the first call of a step computes it."""
        if self._factor is None:
            one = torch.ones(1, dtype=torch.float32, device=get_accelerator().current_device_name())
            unscale_and_clip(one)
            unscale = 1.0 / float(loss_scale)
            self._factor = GradFactor(unscale, float(one) / unscale)
        return self._factor

    @property
    def value(self) -> GradFactor:
        """The step's factor, once computed."""
        assert self._factor is not None, "DeepSpeed stepped without unscaling"
        return self._factor

    def forget(self) -> None:
        """The step is over."""
        self._factor = None


def require_supported(kwargs: dict[str, Any], groups: Sequence[dict[str, Any]]) -> None:
    """Refuse what is not built and is not said in the ``zero_optimization`` section.

    Args:
        kwargs: the keyword arguments of DeepSpeed's optimizer class.
        groups: the parameter groups.

    Raises:
        ConfigError: names the setting.
    """
    refused = {
        "MoE parameter groups": any(group.get("moe") for group in groups) or kwargs.get("has_moe_layers"),
        "bf16_master_weights_and_grads": kwargs.get("bf16_master_weights_and_gradients"),
        "fp16_master_weights_and_grads": kwargs.get("fp16_master_weights_and_gradients"),
        "bf16_optimizer_states": kwargs.get("bf16_optimizer_states"),
    }
    if found := [name for name, given in refused.items() if given]:
        raise ConfigError(
            f"zero_optimization.zenflow is not built for {' and '.join(found)}: "
            "remove that setting or the zenflow section"
        )


def grad_dtype(weights_dtype: torch.dtype, accumulation_dtype: torch.dtype) -> torch.dtype:
    """What gradients are handed over as: like the weights, except that fp16 cannot hold what fp32 has accumulated."""
    return accumulation_dtype if weights_dtype == torch.float16 else weights_dtype


def build_adam(
    zenflow: ZenFlowConfig,
    optimizer: torch.optim.Optimizer,
    masters: Sequence[torch.Tensor],
    groups: Sequence[int],
    weights: Callable[[int], torch.Tensor],
    gradients: torch.dtype,
    process_group: Any,
    place: WorkerPlace | None,
) -> OffloadedAdam[Any]:
    """Start the worker of this rank; `masters` may be freed afterwards.

    Raises:
        ConfigError: ``publish_dtype`` is neither the weights' dtype nor float32.
        WorkerError: the worker does not start, on this or another rank.
    """
    weights_dtype = str(weights(0).dtype).removeprefix("torch.")
    if zenflow.publish_dtype not in (None, "float32", weights_dtype):
        raise ConfigError(
            f'zero_optimization.zenflow.publish_dtype = "{zenflow.publish_dtype}" for a {weights_dtype} model: '
            f'give "{weights_dtype}" or "float32", or leave it out'
        )
    device = torch.device(get_accelerator().current_device_name())
    rule = SelectiveAdam if zenflow.rule == "selective" else PredictiveAdam
    return rule(
        masters,
        groups,
        weights,
        optimizer,
        weights_dtype=weights(0).dtype,
        grad_dtype=gradients,
        settings=zenflow,
        ranks=RankGroup.of(process_group, device),
        seat=unplanned_seat(zenflow, local_world_size()) if place is None else planned_seat(place),
    )


def streaming(adam: OffloadedAdam[Any]) -> PredictiveAdam | None:
    """`adam`, if it takes gradients while backward is still running."""
    return adam if isinstance(adam, PredictiveAdam) and adam.streams_gradients else None


def saved_section(state_dict_list: Any, rank: int) -> dict[str, Any] | None:
    """The ZenFlow section that this rank saved, None if the checkpoint has none."""
    if state_dict_list is None or isinstance(state_dict_list, (str, bytes)):
        return None
    return state_dict_list[rank].get(checkpoint.SECTION)
