"""Refuses combinations of settings that ZenFlow does not support, before anything is changed.

`zenflow.optimizers` checks the user's optimizer. Contradictions within a section are found when it
is read.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from deepspeed_ext.errors import ConfigError
from deepspeed_ext.zenflow.plan.rule import limits_of
from deepspeed_ext.zenflow.worker.kernel.passes import LARGEST_BLOCK

_Row = tuple[str, bool, str]
"""A setting, as in the config; whether it is given; why it cannot be combined with ZenFlow."""


def require_supported(
    section: Any,
    *,
    node_local_storage: bool = False,
    tensor_ranks: int = 1,
    ties_stages: bool = False,
    makes_experts: bool = False,
) -> None:
    """Check the ``zero_optimization`` section, and what DeepSpeed makes of the rest of the config.

    Args:
        node_local_storage: whether each node saves checkpoints to its own storage.
        tensor_ranks: number of tensor-parallel ranks.
        ties_stages: whether stages of a pipeline share parameters.
        makes_experts: whether DeepSpeed's AutoEP replaces layers by its own.

    Raises:
        ConfigError: the section has ``zenflow`` together with settings that it does not support;
            names all of them.
    """
    if (zenflow := section.zenflow) is None:
        return
    limits, of_rule = limits_of(zenflow), f'update_rule = "{zenflow.rule}"'
    _refuse(
        *_of_section(section, of_rule, limits),
        (
            "async_save = true with checkpoint.use_node_local_storage",
            zenflow.async_save and node_local_storage,
            "all ranks must write to one folder",
        ),
        (
            f"{of_rule} with {tensor_ranks} tensor-parallel ranks",
            bool(limits) and tensor_ranks > 1,
            limits,
        ),
        (
            f"{of_rule} with layers that stages of a pipeline share",
            bool(limits) and ties_stages,
            limits,
        ),
        (
            "expert_parallel.enabled = true",
            makes_experts,
            "AutoEP is not built; DeepSpeed's MoE layer works at stages 1 and 2, and experts that "
            "are not distributed work at any stage",
        ),
    )


def _of_section(section: Any, of_rule: str, limits: str) -> Iterator[_Row]:
    zenflow, offload = section.zenflow, section.offload_optimizer
    yield (
        "stage = 0",
        section.stage == 0,
        "DeepSpeed neither partitions nor offloads an optimizer at that stage",
    )
    for name in ("offload_optimizer", "offload_param"):
        on_nvme = getattr(getattr(section, name), "device", None) == "nvme"
        yield f'{name}.device = "nvme"', on_nvme, "it is not built"
    yield from zenflow.refused_moments(limits, LARGEST_BLOCK)
    # with offload_param it has no effect
    on_host, ratio = zenflow.gradients_on_host and section.offload_param is None, section.host_ratio
    yield (
        "gradients_on_host = true at stage 1",
        bool(on_host) and section.stage == 1,
        "DeepSpeed keeps the whole gradient on the accelerator until it is reduced: use stage 2",
    )
    shown = '"auto" (or "fit")' if ratio == "auto" else f"{ratio or 0.0:g}"
    yield (
        f"gradients_on_host = true with offload_optimizer.ratio = {shown}",
        bool(on_host) and offload is not None and ratio not in (None, 1.0),
        "what steps on the accelerator needs its gradients there",
    )
    given = section.model_dump(include={"compute_grad_norm", "mics_shard_size"})
    yield (
        "compute_grad_norm = false",
        given.get("compute_grad_norm") is False,  # a field since DeepSpeed 0.19.7
        "DeepSpeed refuses it with CPU offload",
    )
    yield (
        "mics_shard_size",
        (given.get("mics_shard_size") or 0) > 0,  # a field until DeepSpeed 0.19.6
        "DeepSpeed has an optimizer of its own for it; zero_hpz_partition_size divides alike",
    )


def require_compilable(is_deepcompile: bool, is_autograd_compiled: bool) -> None:
    """Check what ``engine.compile`` is asked for, before the model is compiled.

    Args:
        is_deepcompile: ``compile.deepcompile``, which has no effect without ``engine.compile``.
        is_autograd_compiled: the argument ``compiled_autograd_enabled``.

    Raises:
        ConfigError: either is on.
    """
    _refuse(
        (
            "engine.compile with compiled_autograd_enabled=True",
            is_autograd_compiled,
            "a compiled backward pass cannot queue the callback that completes the gradients",
        ),
        (
            "engine.compile() with compile.deepcompile",
            is_deepcompile,
            "it removes the hooks that give an offloaded optimizer its gradients, so ZeRO-Offload "
            "does not train with it either",
        ),
        remedy="leave it out, and engine.compile() compiles the model with torch.compile",
    )


def _refuse(*rows: _Row, remedy: str = "remove that setting or the zenflow section") -> None:
    if found := [f"{setting} ({why})" for setting, given, why in rows if given]:
        raise ConfigError(
            f"zero_optimization.zenflow does not support {' and '.join(found)}: {remedy}"
        )
