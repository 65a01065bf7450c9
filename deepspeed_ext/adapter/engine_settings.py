"""The settings of an engine: those that ZenFlow replaces are off, those that it implies are on."""

from __future__ import annotations

from typing import Any

from deepspeed_ext.adapter.upstream import DeepSpeedEngine, tensor_ranks
from deepspeed_ext.adapter.zero_config import ZeroConfig
from deepspeed_ext.config import ZenFlowConfig

__all__ = ["EngineSettings"]


class EngineSettings(DeepSpeedEngine):
    """DeepSpeed's engine, which reports settings that ZenFlow replaces as off, and those that it
    implies as on."""

    _ties_stages: bool
    """Whether stages of a pipeline share parameters."""

    @property
    def _settings(self) -> ZeroConfig | None:
        """The ``zero_optimization`` section with our fields; None if it was parsed while the
        extension was off."""
        section = self._config.zero_config
        return section if isinstance(section, ZeroConfig) else None

    @property
    def _zenflow(self) -> ZenFlowConfig | None:
        """The ``zenflow`` section; None also if it is unused: an engine without an optimizer, such
        as a trainer's reference model, may share the trained model's config."""
        if (settings := self._settings) is None or self.optimizer_name() is None:
            return None
        return settings.zenflow_with(super().bf16_optimizer_states())

    def zenflow_config(self) -> Any:
        """None if the section is ours: DeepSpeed's own ZenFlow, and its change of
        ``gradient_accumulation_steps``, stay off."""
        return super().zenflow_config() if self._settings is None else None

    # -- what ZenFlow implies ----------------------------------------------------------------------

    def zero_use_cpu_optimizer(self) -> bool:
        """Also true if ``zenflow`` implies it."""
        return self._zenflow is not None or super().zero_use_cpu_optimizer()

    def zero_cpu_offload(self) -> bool:
        """Also true if ``zenflow`` implies it."""
        return self._zenflow is not None or super().zero_cpu_offload()

    # -- what ZenFlow replaces; `supported.IDLE` says why ------------------------------------------

    def zero_force_ds_cpu_optimizer(self) -> bool:
        return self._zenflow is None and super().zero_force_ds_cpu_optimizer()

    def super_offload(self) -> bool:
        return self._zenflow is None and super().super_offload()

    def zero_elastic_checkpoint(self) -> bool:
        return self._zenflow is None and super().zero_elastic_checkpoint()

    def bf16_master_weights_and_gradients(self) -> bool:
        return self._zenflow is None and super().bf16_master_weights_and_gradients()

    def fp16_master_weights_and_gradients(self) -> bool:
        return self._zenflow is None and super().fp16_master_weights_and_gradients()

    def bf16_optimizer_states(self) -> bool:
        return self._zenflow is None and super().bf16_optimizer_states()

    def _spread(self) -> dict[str, Any]:
        """How the model is spread over ranks; see `supported.require_spreadable`."""
        return {
            "tensor_ranks": max(self.autotp_size(), tensor_ranks(self.mpu)),
            "ties_stages": self._ties_stages,
            "makes_experts": self._config.expert_parallel_config.enabled,
        }

    def _replaced_settings(self) -> list[str]:
        """The keys of `supported.IDLE` that the config turns on."""
        given = {
            "zero_optimization.offload_optimizer.super_offload": super().super_offload(),
            "zero_optimization.elastic_checkpoint": super().zero_elastic_checkpoint(),
            "zero_optimization.pipeline_loading_checkpoint": (
                self._config.zero_config.pipeline_loading_checkpoint
            ),
            "bf16.bf16_master_weights_and_grads": super().bf16_master_weights_and_gradients(),
            "fp16.fp16_master_weights_and_grads": super().fp16_master_weights_and_gradients(),
            "bf16.bf16_optimizer_states": super().bf16_optimizer_states()
            and (self._zenflow is None or self._zenflow.keeps_exact_moments),
        }
        return [name for name, is_on in given.items() if is_on]
