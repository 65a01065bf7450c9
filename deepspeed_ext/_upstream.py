"""The only file that names a private part of DeepSpeed.

Everything that deepspeed_ext reads, overrides or swaps in DeepSpeed beyond its public functions is listed here, once:
the supported versions, the classes that are subclassed, the names that are swapped, and `CONTRACT`, the members that
our subclasses rely on. `check` compares the contract with the installed DeepSpeed and names whatever has moved.
"""

from __future__ import annotations

import importlib
import inspect
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import deepspeed
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime import engine as engine_module
from deepspeed.runtime.base_optimizer import ZeROOptimizer
from deepspeed.runtime.checkpoint_engine import TorchCheckpointEngine
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.hybrid_engine import DeepSpeedHybridEngine
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.superoffload import superoffload_stage3 as _superoffload_stage3  # noqa: F401
from deepspeed.runtime.zero import config as zero_config_module
from deepspeed.runtime.zero import stage3 as stage3_module
from deepspeed.runtime.zero import stage_1_and_2 as stage_1_and_2_module
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from deepspeed.runtime.zero.offload_config import DeepSpeedZeroOffloadOptimizerConfig, OffloadDeviceEnum
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus as ParameterStatus
from deepspeed.runtime.zero.partition_parameters import get_allgather_dtype as communication_dtype
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3 as DeepSpeedZeroOptimizerStage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from deepspeed.utils.tensor_fragment import tensor_fragment as TensorFragment  # noqa: N812 (it is a class)

from deepspeed_ext._errors import UpstreamError

__all__ = [
    "DeepSpeedEngine",
    "DeepSpeedHybridEngine",
    "DeepSpeedZeroConfig",
    "DeepSpeedZeroOptimizer",
    "DeepSpeedZeroOptimizerStage3",
    "OffloadDeviceEnum",
    "ParameterStatus",
    "PartitionedParameter",
    "PipelineEngine",
    "Swap",
    "TensorFragment",
    "TorchCheckpointEngine",
    "ZeROOptimizer",
    "accelerator_branch_only",
    "all_gather_of_partitions",
    "check",
    "communication_dtype",
    "deepspeed",
    "dist",
    "entry_swaps",
    "get_accelerator",
    "host_offload_config",
    "is_on_nvme",
    "is_quantized",
    "local_rank",
    "local_world_size",
    "optimizer_class",
    "partition_exchange",
    "stage3_optimizer_class",
    "pins_offload_buffers",
    "swapped",
]

PartitionedParameter = Any
"""A ``torch.nn.Parameter`` converted by ``zero.Init``, with its ``ds_*`` attributes."""

SUPPORTED_FROM = (0, 19, 8)
SUPPORTED_BELOW = (0, 20, 0)

# member -> parameters that we pass or override; None: an attribute or a method whose signature does not matter to us
CONTRACT: dict[str, tuple[str, ...] | None] = {
    "deepspeed:DeepSpeedEngine": None,
    "deepspeed:DeepSpeedHybridEngine": None,
    "deepspeed:PipelineEngine": None,
    "deepspeed.runtime.engine:DeepSpeedZeroOptimizer": None,
    "deepspeed.runtime.engine:DeepSpeedEngine._configure_zero_optimizer": ("self", "optimizer"),
    "deepspeed.runtime.engine:DeepSpeedEngine._configure_optimizer": ("self", "client_optimizer", "model_parameters"),
    "deepspeed.runtime.engine:DeepSpeedEngine.zero_optimization_stage": ("self",),
    "deepspeed.runtime.engine:DeepSpeedEngine.is_sanity_checks_enabled": ("self",),
    "deepspeed.runtime.zero.config:DeepSpeedZeroConfig.__init__": None,
    "deepspeed.runtime.zero.config:get_zero_config": ("param_dict",),
    "deepspeed.runtime.zero.stage_1_and_2:get_accelerator": None,
    "deepspeed.runtime.zero.stage_1_and_2:all_gather_dp_groups": (
        "groups_flat",
        "partitioned_param_groups",
        "dp_process_group",
        "start_alignment_factor",
        "allgather_bucket_size",
    ),
    "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer.flatten_dense_tensors_aligned": (
        "self",
        "tensor_list",
        "alignment",
        "use_cpu_data",
        "param_padding",
    ),
    "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer.get_data_parallel_partitions": (
        "self",
        "tensor",
        "group_id",
    ),
    "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer._update_model_bit16_weights": ("self", "group_index"),
    "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer.initialize_optimizer_states": ("self",),
    "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer.initialize_gradient_partitioning_data_structures": (
        "self",
    ),
    "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer.create_gradient_handling_hooks": ("self",),
    "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer._link_all_hp_params": ("self",),
    "deepspeed.runtime.zero.partition_parameters:get_allgather_dtype": ("param", "param_ds_tensor"),
    "deepspeed.runtime.zero.partition_parameters:ZeroParamStatus.AVAILABLE": None,
    "deepspeed.runtime.zero.partition_parameters:ZeroParamStatus.NOT_AVAILABLE": None,
    "deepspeed.runtime.zero.partition_parameters:ZeroParamStatus.INFLIGHT": None,
    "deepspeed.runtime.zero.partition_parameters:Init._convert_to_deepspeed_param": ("self", "param"),
    "deepspeed.accelerator.abstract_accelerator:DeepSpeedAccelerator.pin_empty": None,
    "deepspeed.runtime.engine:DeepSpeedEngine._configure_checkpointing": ("self",),
    "deepspeed.runtime.engine:DeepSpeedEngine.save_checkpoint": (
        "self",
        "save_dir",
        "tag",
        "client_state",
        "save_latest",
        "exclude_frozen_parameters",
    ),
    "deepspeed.runtime.engine:DeepSpeedEngine._save_checkpoint": None,
    "deepspeed.runtime.engine:DeepSpeedEngine._save_zero_checkpoint": None,
    "deepspeed.runtime.engine:DeepSpeedEngine.use_node_local_storage": ("self",),
    "deepspeed.runtime.engine:DeepSpeedEngine.load_universal_checkpoint": ("self",),
    "deepspeed.runtime.checkpoint_engine:TorchCheckpointEngine.create": ("self", "info"),
    "deepspeed.runtime.engine:DeepSpeedEngine._copy_recovery_script": ("self", "save_path"),
    "deepspeed.runtime.engine:DeepSpeedEngine.load_checkpoint": None,
    "deepspeed.runtime.checkpoint_engine:TorchCheckpointEngine.__init__": ("self", "config_params"),
    "deepspeed.runtime.checkpoint_engine:TorchCheckpointEngine.makedirs": ("self", "path", "exist_ok"),
    "deepspeed.runtime.checkpoint_engine:TorchCheckpointEngine.save": ("self", "state_dict", "path"),
    "deepspeed.runtime.checkpoint_engine:TorchCheckpointEngine.load": ("self", "path", "map_location"),
    "deepspeed.runtime.checkpoint_engine:TorchCheckpointEngine.commit": ("self", "info"),
    "deepspeed.runtime.engine:DeepSpeedEngine.zenflow_config": ("self",),
    "deepspeed.runtime.engine:DeepSpeedEngine._take_model_step": ("self", "lr_kwargs"),
    "deepspeed.runtime.engine:DeepSpeedEngine.zero_force_ds_cpu_optimizer": ("self",),
    "deepspeed.runtime.engine:DeepSpeedEngine.zero_use_cpu_optimizer": ("self",),
    "deepspeed.runtime.engine:DeepSpeedEngine.zero_cpu_offload": ("self",),
    "deepspeed.utils.tensor_fragment:tensor_fragment.get_hp_fragment": ("self", "optim_state_key"),
    "deepspeed.runtime.engine:DeepSpeedEngine.get_optimizer_configuration": (
        "self",
        "optimizer_parameters",
        "adam_w_mode",
        "allow_legacy_fallback",
    ),
    **{
        f"deepspeed.runtime.zero.{module}:{optimizer}.{member}": parameters
        for module, optimizer, group in (
            ("stage_1_and_2", "DeepSpeedZeroOptimizer", "group_no"),
            ("stage3", "DeepSpeedZeroOptimizer_Stage3", "sub_group_id"),
        )
        for member, parameters in {
            "step": ("self", "closure"),
            "_optimizer_step": ("self", group),
            "check_overflow": ("self", "partition_gradients"),
            "get_grad_norm_direct": ("self", "gradients", "params", "norm_type"),
            "initialize_optimizer_states": ("self",),
            "state_dict": ("self",),
            "_restore_from_bit16_weights": ("self",),
            "destroy": ("self",),
            "load_state_dict": (
                "self",
                "state_dict_list",
                "load_optimizer_states",
                "load_from_fp32_weights",
                "checkpoint_folder",
                "load_serial",
                "param_shapes",
            ),
        }.items()
    },
    "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer.unscale_and_clip_grads": (
        "self",
        "grad_groups_flat",
        "total_norm",
    ),
    "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer.update_lp_params": ("self",),
    "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer.copy_grads_in_partition": (
        "self",
        "param",
        "group_idx",
    ),
    "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer.get_gradient_for_reduction": ("self", "param"),
    "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer._get_preflattened_grad_partition": (
        "self",
        "group_idx",
    ),
    "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer._get_compact_grad_partition_slice": (
        "self",
        "group_idx",
        "partition_id",
        "param_id",
        "num_elements",
    ),
    "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer._lazy_init_hp_params_optimizer_state": ("self",),
    # DeepSpeed wraps these for profiling, which hides their parameters.
    "deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3.unscale_and_clip_grads": None,
    "deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3.step": None,
    "deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3.partition_grads": None,
    "deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3._get_fp32_opt_state_partition": None,
    "deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3._partition_all_parameters": None,
    "deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3._get_param_partition_rank": ("self", "param"),
    "deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3.invalidate_secondary_tensor": ("self",),
}


def moved() -> list[str]:
    """What of `CONTRACT` the installed DeepSpeed does not fulfil: one line a member, empty if all is well."""
    found = []
    for name, expected in CONTRACT.items():
        module_name, path = name.split(":")
        try:
            member: Any = importlib.import_module(module_name)
            for part in path.split("."):
                member = inspect.getattr_static(member, part)
        except (ImportError, AttributeError):
            found.append(f"{name} does not exist")
            continue
        if expected is not None:
            parameters = tuple(inspect.signature(_undecorated(member)).parameters)
            if parameters != expected:
                found.append(f"{name} takes {parameters}, expected {expected}")
    return found


def _undecorated(member: Any) -> Any:
    """The function behind a decorator that takes anything, as DeepSpeed's for profiler ranges; else `member`."""
    cells = [cell.cell_contents for cell in getattr(member, "__closure__", None) or ()]
    functions = [cell for cell in cells if inspect.isfunction(cell)]
    takes_anything = tuple(inspect.signature(member).parameters) == ("args", "kwargs")
    return functions[0] if takes_anything and len(functions) == 1 else member


def check() -> None:
    """Refuse a DeepSpeed that this package does not know.

    Raises:
        UpstreamError: the version is outside the supported range, or a member of `CONTRACT` has moved.
    """
    found = (deepspeed.__version_major__, deepspeed.__version_minor__, deepspeed.__version_patch__)
    if not SUPPORTED_FROM <= found < SUPPORTED_BELOW:
        first, below = (".".join(map(str, bound)) for bound in (SUPPORTED_FROM, SUPPORTED_BELOW))
        raise UpstreamError(
            f"deepspeed_ext supports DeepSpeed from {first} to below {below} and found {deepspeed.__version__}; "
            f"install one with: pip install 'deepspeed>={first},<{below}'"
        )
    if lines := moved():
        raise UpstreamError(
            f"DeepSpeed {deepspeed.__version__} differs from what deepspeed_ext builds on: {'; '.join(lines)}. "
            "Install the DeepSpeed version named in the README, or a newer deepspeed_ext"
        )


@dataclass(frozen=True)
class Swap:
    """One module-level name and the object to stand in for it."""

    module: Any
    name: str
    replacement: Any


_swap_lock = threading.Lock()


@contextmanager
def swapped(*swaps: Swap) -> Iterator[None]:
    """Let every `swaps` name mean its replacement inside the block; restores the old objects, also after an error."""
    with _swap_lock:
        before = [(swap.module, swap.name, getattr(swap.module, swap.name)) for swap in swaps]
        for swap in swaps:
            setattr(swap.module, swap.name, swap.replacement)
    try:
        yield
    finally:
        with _swap_lock:
            for module, name, original in reversed(before):
                setattr(module, name, original)


def entry_swaps(
    engine: type[DeepSpeedEngine],
    hybrid_engine: type[DeepSpeedHybridEngine],
    pipeline_engine: type[PipelineEngine],
    zero_config: type[DeepSpeedZeroConfig],
) -> list[Swap]:
    """The names by which ``deepspeed.initialize`` finds its engines and its config class."""
    return [
        Swap(deepspeed, "DeepSpeedEngine", engine),
        Swap(deepspeed, "DeepSpeedHybridEngine", hybrid_engine),
        Swap(deepspeed, "PipelineEngine", pipeline_engine),
        Swap(zero_config_module, "DeepSpeedZeroConfig", zero_config),
    ]


def optimizer_class(stage_1_and_2: Callable[..., DeepSpeedZeroOptimizer]) -> Swap:
    """The name by which ``DeepSpeedEngine._configure_zero_optimizer`` finds its stage 1/2 optimizer."""
    return Swap(engine_module, "DeepSpeedZeroOptimizer", stage_1_and_2)


def stage3_optimizer_class(stage3: Callable[..., DeepSpeedZeroOptimizerStage3]) -> Swap:
    """The name by which ``DeepSpeedEngine._configure_zero_optimizer`` finds its stage 3 optimizer.

    It imports SuperOffload there too, whose optimizer is a subclass: that module must be loaded before the swap.
    """
    return Swap(stage3_module, "DeepSpeedZeroOptimizer_Stage3", stage3)


def host_offload_config() -> DeepSpeedZeroOffloadOptimizerConfig:
    """An ``offload_optimizer`` section that puts masters into pageable host memory, and nothing else."""
    return DeepSpeedZeroOffloadOptimizerConfig(device=OffloadDeviceEnum.cpu, pin_memory=False)


def local_world_size() -> int:
    """Number of ranks on this host, as the launcher says."""
    return int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE") or 1)


def local_rank() -> int:
    """This rank's number on its host, as the launcher says."""
    return int(os.environ.get("LOCAL_RANK") or 0)


class _RoomyAccelerator:
    """The accelerator, except that it always has room for another flat buffer."""

    def __init__(self, accelerator: Any) -> None:
        self._accelerator = accelerator

    def __getattr__(self, name: str) -> Any:
        return getattr(self._accelerator, name)

    def available_memory(self, device_index: int | None = None) -> int:
        return sys.maxsize

    def pin_memory(self, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        if self._accelerator.is_pinned(tensor):  # upstream would copy it once more
            return tensor
        return self._accelerator.pin_memory(tensor, *args, **kwargs)


def accelerator_branch_only() -> Swap:
    """Keeps the stage 1/2 constructor from moving parameters through pageable host memory.

    That constructor decides inside a loop whether a group fits, by asking the accelerator (on NVIDIA: NVML) for its
    free memory. Told that there is room, it always calls ``flatten_dense_tensors_aligned``, which our subclass
    overrides and where the real decision is taken.
    """
    return Swap(stage_1_and_2_module, "get_accelerator", lambda: _RoomyAccelerator(get_accelerator()))


def all_gather_of_partitions() -> Callable[..., None]:
    """The function by which the stage 1/2 optimizer gathers 16-bit partitions at the end of a step."""
    return stage_1_and_2_module.all_gather_dp_groups


def partition_exchange(exchange: Callable[..., None]) -> Swap:
    """The name by which the stage 1/2 optimizer finds `all_gather_of_partitions`."""
    return Swap(stage_1_and_2_module, "all_gather_dp_groups", exchange)


def pins_offload_buffers(offload_config: Any) -> bool:
    """Whether ``zero_optimization.offload_optimizer`` asks for page-locked host buffers."""
    return offload_config is not None and offload_config.device != OffloadDeviceEnum.none and offload_config.pin_memory


def is_on_nvme(param: PartitionedParameter) -> bool:
    """Whether the partition of `param` is swapped to NVMe between uses."""
    return param.ds_tensor.final_location == OffloadDeviceEnum.nvme


def is_quantized(param: PartitionedParameter, zero_config: DeepSpeedZeroConfig) -> bool:
    """Whether `param` travels quantized: it is stored so, or every weight is quantized for its all-gather."""
    return hasattr(param.ds_tensor, "ds_quant_scale") or zero_config.zero_quantized_weights
