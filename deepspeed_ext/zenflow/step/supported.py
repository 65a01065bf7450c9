"""Refuses combinations of settings that ZenFlow does not support.

Each function checks one part as soon as it is known: the ``zero_optimization`` section, then what
DeepSpeed makes of the rest of the config. `zenflow.optimizers` checks the user's optimizer.
Contradictions within a section are found when it is read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from deepspeed_ext.config import ZenFlowConfig
from deepspeed_ext.errors import ConfigError
from deepspeed_ext.zenflow.plan.rules import limits_of
from deepspeed_ext.zenflow.worker.kernel.rounding import LARGEST_BLOCK

__all__ = [
    "IDLE",
    "Refusal",
    "require_compilable",
    "require_group_timeout",
    "require_section",
    "require_shared_folder",
    "require_spreadable",
]

IDLE = {
    "zero_optimization.offload_optimizer.super_offload": (
        "ZenFlow's optimizer process takes its place"
    ),
    "zero_optimization.elastic_checkpoint": (
        "a checkpoint of any number of ranks is loaded without it"
    ),
    "zero_optimization.pipeline_loading_checkpoint": (
        "all ranks load at once, and map their files to read only what they need"
    ),
    "bf16.bf16_master_weights_and_grads": (
        "ZenFlow keeps p in fp32, which takes 2 more bytes per parameter"
    ),
    "fp16.fp16_master_weights_and_grads": (
        "ZenFlow keeps p in fp32, which takes 2 more bytes per parameter"
    ),
    "bf16.bf16_optimizer_states": (
        "zenflow.state_dtype says float32, or this rule keeps m and v in fp32"
    ),
}
"""Settings that ZenFlow replaces with something at least as good, each with that replacement."""


@dataclass(frozen=True)
class Refusal:
    """A setting that ZenFlow does not support.

    Attributes:
        setting: its name and value, as in the config.
        given: whether the config has it.
        reason: why it cannot be combined with ZenFlow.
    """

    setting: str
    given: bool
    reason: str


def require_section(section: Any) -> None:
    """Check the ``zero_optimization`` section.

    Raises:
        ConfigError: it has ``zenflow`` together with a setting that ZenFlow does not support.
    """
    if section.zenflow is None:
        return
    zenflow = section.zenflow
    offloads = {
        "offload_optimizer": section.offload_optimizer,
        "offload_param": section.offload_param,
    }
    of_moments = zenflow.refused_moments(limits_of(zenflow), LARGEST_BLOCK)
    _refuse(
        Refusal(
            "stage = 0",
            section.stage == 0,
            "DeepSpeed neither partitions nor offloads an optimizer at that stage",
        ),
        *(
            Refusal(
                f'{name}.device = "nvme"',
                each is not None and each.device == "nvme",
                "it is not built",
            )
            for name, each in offloads.items()
        ),
        *_of_gradients(section),
        *(Refusal(*each) for each in of_moments),
        Refusal(
            "compute_grad_norm = false",
            _field(section, "compute_grad_norm") is False,  # since DeepSpeed 0.19.7
            "DeepSpeed refuses it with CPU offload",
        ),
        Refusal(
            "mics_shard_size",
            (_field(section, "mics_shard_size") or 0) > 0,  # until DeepSpeed 0.19.6
            "DeepSpeed has an optimizer of its own for it; zero_hpz_partition_size divides alike",
        ),
    )


def _field(section: Any, name: str) -> Any:
    """The value of a field that some releases of DeepSpeed lack; None: this one does."""
    return section.model_dump(include={name}).get(name)


def require_shared_folder(section: Any, node_local: bool) -> None:
    """Check that the storage of checkpoints suits saves beside training.

    Args:
        section: the ``zero_optimization`` section.
        node_local: whether each node saves to its own storage.

    Raises:
        ConfigError: saves beside training are on, and such storage cannot complete them.
    """
    if section.zenflow is not None and section.zenflow.async_save and node_local:
        raise ConfigError(
            "zero_optimization.zenflow.async_save needs one folder that all ranks write to: remove "
            "it, or checkpoint.use_node_local_storage"
        )


def require_spreadable(
    zenflow: ZenFlowConfig, *, tensor_ranks: int, ties_stages: bool, makes_experts: bool
) -> None:
    """Check how the model is spread over ranks.

    Args:
        tensor_ranks: number of tensor-parallel ranks.
        ties_stages: whether stages of a pipeline share parameters.
        makes_experts: whether DeepSpeed's AutoEP replaces layers by its own.

    Raises:
        ConfigError: copies of a parameter on several ranks would diverge, or the combination is not
            built.
    """
    limits, of_rule = limits_of(zenflow), f'update_rule = "{zenflow.rule}"'
    _refuse(
        Refusal(
            f"{of_rule} with {tensor_ranks} tensor-parallel ranks",
            bool(limits) and tensor_ranks > 1,
            limits,
        ),
        Refusal(
            f"{of_rule} with layers that stages of a pipeline share",
            bool(limits) and ties_stages,
            limits,
        ),
        Refusal(
            "expert_parallel.enabled = true",
            makes_experts,
            "AutoEP is not built; DeepSpeed's MoE layer works at stages 1 and 2, and experts that "
            "are not distributed work at any stage",
        ),
    )


def require_compilable(is_deepcompile: bool, is_autograd_compiled: bool) -> None:
    """Check what ``engine.compile`` is asked for, before the model is compiled.

    Args:
        is_deepcompile: ``compile.deepcompile``, which has no effect without ``engine.compile``.
        is_autograd_compiled: the argument ``compiled_autograd_enabled``.

    Raises:
        ConfigError: either is on.
    """
    if is_autograd_compiled:
        raise ConfigError(
            "zero_optimization.zenflow does not support engine.compile with "
            "compiled_autograd_enabled=True (a compiled backward pass cannot queue the callback "
            "that completes the gradients): leave that argument out"
        )
    if is_deepcompile:
        raise ConfigError(
            "zero_optimization.zenflow does not support engine.compile() with compile.deepcompile "
            "(it removes the hooks that give an offloaded optimizer its gradients, so "
            "ZeRO-Offload does not train with it either): remove that setting, and "
            "engine.compile() compiles the model with torch.compile"
        )


def require_group_timeout(timeout_seconds: float, group_timeout_seconds: float) -> None:
    """Check the longest wait for the worker, during which the other ranks wait in a collective.

    Args:
        timeout_seconds: the longest wait for the worker.
        group_timeout_seconds: timeout of the process group.

    Raises:
        ConfigError: the collective would time out first.
    """
    if timeout_seconds >= group_timeout_seconds:
        raise ConfigError(
            f"zero_optimization.zenflow.worker_timeout_seconds = {timeout_seconds:g} is not below "
            f"the process group's timeout of {group_timeout_seconds:g} s, after which the "
            "communication library ends the job: lower it, or raise the group's timeout "
            "(init_distributed, or DEEPSPEED_TIMEOUT in minutes)"
        )


def _of_gradients(section: Any) -> list[Refusal]:
    """What contradicts ``gradients_on_host: true``, which has no effect with ``offload_param``."""
    name, zenflow, offload = "gradients_on_host = true", section.zenflow, section.offload_optimizer
    given = bool(zenflow.gradients_on_host) and section.offload_param is None
    given_ratio = section.host_ratio
    ratio = '"auto" (or "fit")' if given_ratio == "auto" else f"{given_ratio or 0.0:g}"
    return [
        Refusal(
            f"{name} at stage 1",
            given and section.stage == 1,
            "DeepSpeed keeps the whole gradient on the "
            "accelerator until it is reduced: use stage 2",
        ),
        Refusal(
            f"{name} with offload_optimizer.ratio = {ratio}",
            given and offload is not None and given_ratio not in (None, 1.0),
            "what steps on the accelerator needs its gradients there",
        ),
    ]


def _refuse(*refusals: Refusal) -> None:
    if found := [f"{each.setting} ({each.reason})" for each in refusals if each.given]:
        raise ConfigError(
            f"zero_optimization.zenflow does not support {' and '.join(found)}: "
            "remove that setting or the zenflow section"
        )
