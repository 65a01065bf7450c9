"""Lists every member of DeepSpeed that deepspeed_ext relies on, and compares the list with the
installed version.

`upstream` names the classes. This file lists their members: those that our subclasses override,
call through ``super()``, read or assign, and the attributes that DeepSpeed sets on parameters. A
test searches our sources for members that are missing here. So if DeepSpeed renames a method,
start-up fails, instead of our override silently having no effect.

`stand_ins` lists what DeepSpeed uses of our objects that stand in for its own.
"""

from __future__ import annotations

import importlib
import inspect
from dataclasses import dataclass
from typing import Any

__all__ = [
    "ASSIGNED",
    "CONTRACT",
    "EXISTS",
    "Member",
    "Since",
    "Takes",
    "broken",
    "expected_members",
    "release",
    "undecorated",
]

EXISTS = "exists"
"""A class, a property, or a function with any parameters."""

ASSIGNED = "assigned"
"""An attribute that methods of the class assign; for a module, one that its functions set on any
object."""


@dataclass(frozen=True)
class Takes:
    """A function that has at least parameters of these names."""

    names: tuple[str, ...]


@dataclass(frozen=True)
class Since:
    """A member that releases before `release` lack, and what is expected of it since.
    `adapter.releases` replaces it there."""

    release: tuple[int, int, int]
    expected: str | Takes


Member = str | Takes | Since
"""`EXISTS`, `ASSIGNED`, `Takes`, or all parameters of a function in order:
``"(self, closure)"``."""


_OF_BOTH_OPTIMIZERS: dict[str, Member] = {
    "_restore_from_bit16_weights": "(self)",
    "check_overflow": "(self, partition_gradients)",
    "destroy": "(self)",
    "clear_backward_seen_flag": "(self)",
    "get_grad_norm_direct": "(self, gradients, params, norm_type)",
    "independent_gradient_partition_epilogue": "(self)",
    "initialize_optimizer_states": "(self)",
    "load_state_dict": (
        "(self, state_dict_list, load_optimizer_states, load_from_fp32_weights, checkpoint_folder, "
        "load_serial, param_shapes)"
    ),
    "loss_scale": EXISTS,
    "offload_states": "(self, include, device, pin_memory, non_blocking)",
    "register_grad_acc_post_hook": "(self, hook)",
    "reload_states": "(self, non_blocking)",
    "reset_cpu_buffers": "(self)",
    "state_dict": "(self)",
    "step": "(self, closure)",
    "unregister_grad_acc_post_hooks": "(self)",
    "contiguous_gradients": ASSIGNED,
    "zero_grad": "(self, set_to_none)",
    "_backward_hook_state": ASSIGNED,
    "averaged_gradients": ASSIGNED,
    "device": ASSIGNED,
    "dp_process_group": ASSIGNED,
    "dtype": ASSIGNED,
    "gradient_accumulation_dtype": ASSIGNED,
    "offloaded_states": ASSIGNED,
    "optimizer": ASSIGNED,
    "overflow": ASSIGNED,
    "reduce_bucket_size": ASSIGNED,
    "torch_autocast_gradscaler": ASSIGNED,
}

_BUILT_WITH = (
    "gradient_accumulation_dtype",
    "gradient_accumulation_steps",
    "offload_optimizer_config",
)

CONTRACT: dict[str, dict[str, Member]] = {
    "deepspeed": {
        "DeepSpeedConfig": EXISTS,
        "DeepSpeedEngine": EXISTS,
        "DeepSpeedHybridEngine": EXISTS,
        "PipelineEngine": EXISTS,
        "initialize": EXISTS,
    },
    "deepspeed.accelerator.abstract_accelerator:DeepSpeedAccelerator": {
        "is_fp64_supported": Since((0, 19, 6), "(self)"),
        "pin_empty": Since((0, 19, 7), EXISTS),
        "pin_memory_alignment": Since((0, 19, 8), "(self)"),
        "register_host_memory": Since((0, 19, 6), "(self, address, num_bytes)"),
        "unregister_host_memory": Since((0, 19, 6), "(self, address)"),
    },
    "deepspeed.ops.adam": {"DeepSpeedCPUAdam": EXISTS},
    "deepspeed.ops.adam.cpu_adam:DeepSpeedCPUAdam": {
        "__init__": Takes(
            ("bias_correction", "adamw_mode", "fp32_optimizer_states", "weight_decay")
        ),
        "adam_w_mode": ASSIGNED,
    },
    "deepspeed.ops.adam.fused_adam:FusedAdam": {"adam_w_mode": ASSIGNED},
    "deepspeed.ops.lion": {"DeepSpeedCPULion": EXISTS},
    "deepspeed.ops.lion.cpu_lion:DeepSpeedCPULion": {
        "__init__": "(self, model_params, lr, betas, weight_decay, fp32_optimizer_states)",
    },
    "deepspeed.ops.op_builder.builder:OpBuilder": {"jit_load": "(self, verbose)", "name": ASSIGNED},
    "deepspeed.comm.comm": {"mpi_discovery": Takes(())},
    "deepspeed.comm.torch": {"build_shm_op": "()"},
    "deepspeed.runtime.base_optimizer:BackwardHookStateManager": {
        "enter_backward": "(self)",
        "queue_post_backward_callback": "(self)",
        "reenter_backward_if_needed": "(self)",
        "run_grad_acc_post_hooks": "(self)",
        "backward_active_depth": ASSIGNED,
        "backward_seen_this_step": ASSIGNED,
        "post_backward_callback_queued": ASSIGNED,
    },
    "deepspeed.runtime.checkpoint_engine:TorchCheckpointEngine": {
        "__init__": "(self, config_params)",
        "commit": "(self, info)",
        "create": "(self, info)",
        "load": "(self, path, map_location)",
        "makedirs": "(self, path, exist_ok)",
        "preserves_storage_sharing": "(self)",
        "save": "(self, state_dict, path)",
    },
    "deepspeed.runtime.engine": {"DeepSpeedZeroOptimizer": EXISTS, "ThroughputTimer": EXISTS},
    "deepspeed.runtime.engine:DeepSpeedEngine": {
        "_backward_post_hook": "(self)",
        "_backward_prologue": "(self)",
        "_configure_checkpointing": "(self)",
        "_configure_basic_optimizer": "(self, model_parameters)",
        "_configure_expert_parallel": Since((0, 19, 2), Takes(("model",))),
        "_configure_optimizer": "(self, client_optimizer, model_parameters)",
        "_configure_zero_optimizer": "(self, optimizer)",
        "_copy_recovery_script": "(self, save_path)",
        "_create_module_forward_post_hook": "(self)",
        "_create_module_forward_pre_hook": "(self)",
        "_do_sanity_check": "(self)",
        "_forward_epilogue": "(self)",
        "_forward_prologue": "(self, inputs, kwargs)",
        "_get_all_ckpt_names": "(self, checkpoints_path, tag)",
        "_get_ckpt_name": Takes(("checkpoints_path", "tag")),
        "_get_zero_ckpt_name": "(self, checkpoints_path, tag)",
        "_get_zero_param_shapes": "(self)",
        "_load_checkpoint": (
            "(self, load_dir, tag, load_module_strict, load_optimizer_states, "
            "load_lr_scheduler_states,"
            " load_module_only, custom_load_fn)"
        ),
        "_load_zero_checkpoint": "(self, load_dir, tag, load_optimizer_states)",
        "_refine_include_states": Since((0, 19, 0), "(self, include)"),
        "_save_checkpoint": EXISTS,
        "_save_moe_checkpoint": EXISTS,
        "_save_zero_checkpoint": EXISTS,
        "_set_distributed_vars": "(self, args)",
        "_take_model_step": Takes(("lr_kwargs",)),
        "autotp_size": "(self)",
        "_zero3_consolidated_16bit_state_dict": "(self, exclude_frozen_parameters)",
        "backward": "(self, loss, retain_graph, scale_wrt_gas)",
        "bf16_master_weights_and_gradients": "(self)",
        "bf16_optimizer_states": "(self)",
        "bfloat16_enabled": "(self)",
        "compile": Takes(("backend", "compile_kwargs")),
        "destroy": "(self)",
        "forward": "(self, inputs, kwargs)",
        "fp16_master_weights_and_gradients": "(self)",
        "gradient_accumulation_steps": "(self)",
        "is_deepcompile_enabled": "(self)",
        "is_gradient_accumulation_boundary": "(self)",
        "managed_gradient_accumulation": Since((0, 19, 4), "(self)"),
        "is_sanity_checks_enabled": "(self)",
        "load_checkpoint": (
            "(self, load_dir, tag, load_module_strict, load_optimizer_states, "
            "load_lr_scheduler_states,"
            " load_module_only, custom_load_fn)"
        ),
        "load_module_state_dict": Takes(("checkpoint", "strict", "custom_load_fn")),
        "load_universal_checkpoint": "(self)",
        "offload_states": Takes(("include",)),
        "optimizer_name": "(self)",
        "reload_states": "(self, non_blocking)",
        "eval": "(self)",
        "save_16bit_model": "(self, save_dir, save_filename, exclude_frozen_parameters)",
        "save_checkpoint": "(self, save_dir, tag, client_state, save_latest, "
        "exclude_frozen_parameters)",
        "step": "(self, lr_kwargs)",
        "steps_per_print": "(self)",
        "super_offload": "(self)",
        "use_node_local_storage": "(self)",
        "wall_clock_breakdown": "(self)",
        "zenflow_config": "(self)",
        "zero_cpu_offload": "(self)",
        "zero_elastic_checkpoint": "(self)",
        "zero_force_ds_cpu_optimizer": "(self)",
        "zero_load_from_fp32_weights": "(self)",
        "zero_nvme_offload_optimizer": "(self)",
        "zero_optimization": "(self)",
        "zero_optimization_stage": "(self)",
        "zero_use_cpu_optimizer": "(self)",
        "_config": ASSIGNED,
        "checkpoint_engine": ASSIGNED,
        "global_rank": ASSIGNED,
        "global_samples": ASSIGNED,
        "global_steps": ASSIGNED,
        "has_moe_layers": ASSIGNED,
        "loaded_checkpoint_dp_world_size": ASSIGNED,
        "local_rank": ASSIGNED,
        "lr_scheduler": ASSIGNED,
        "monitor": ASSIGNED,
        "mp_world_size": ASSIGNED,
        "mpu": ASSIGNED,
        "optimizer": ASSIGNED,
        "seq_data_parallel_group": ASSIGNED,
        "seq_dp_world_size": ASSIGNED,
        "training_dataloader": ASSIGNED,
    },
    "deepspeed.runtime.config:DeepSpeedConfig": {
        "__init__": Takes(("config",)),
        "_do_error_check": "(self)",
        "expert_parallel_config": Since((0, 19, 2), ASSIGNED),
        "zero_config": ASSIGNED,
    },
    "deepspeed.monitor.monitor:MonitorMaster": {
        "write_events": "(self, event_list)",
        "enabled": ASSIGNED,
    },
    "deepspeed.accelerator.cpu_accelerator:CPU_Accelerator": {"is_fp16_supported": "(self)"},
    "deepspeed.runtime.fp16.loss_scaler:DynamicLossScaler": {
        "__init__": Takes(
            ("init_scale", "scale_window", "min_scale", "delayed_shift", "consecutive_hysteresis")
        ),
        "loss_scale": EXISTS,
        "update_scale": "(self, overflow)",
    },
    "deepspeed.runtime.fp16.loss_scaler": {"LossScalerBase": EXISTS},
    "deepspeed.runtime.fp16.loss_scaler:LossScaler": {
        "__init__": "(self, scale)",
        "update_scale": "(self, overflow)",
    },
    "deepspeed.runtime.lr_schedules": {
        "WarmupLR": EXISTS,
        "WarmupDecayLR": EXISTS,
        "OneCycle": EXISTS,
    },
    "deepspeed.runtime.pipe.module": {"ds_pipe_replicated": ASSIGNED},
    "deepspeed.runtime.pipe.module:PipelineModule": {"mpu": "(self)"},
    "deepspeed.runtime.zero.config": {"get_zero_config": "(param_dict)"},
    "deepspeed.runtime.zero.config:DeepSpeedZeroConfig": {"__init__": EXISTS},
    "deepspeed.runtime.zero.offload_config:OffloadStateTypeEnum": {
        "hp_params": EXISTS,
        "lp_grads": EXISTS,
        "lp_params": EXISTS,
        "optim_states": EXISTS,
    },
    "deepspeed.runtime.zero.partition_parameters": {
        "get_allgather_dtype": "(param, param_ds_tensor)",
        # set on every parameter, or on its partition
        "all_gather": ASSIGNED,
        "all_gather_coalesced": ASSIGNED,
        "ds_id": ASSIGNED,
        "ds_numel": ASSIGNED,
        "ds_process_group": ASSIGNED,
        "ds_quant_scale": ASSIGNED,
        "ds_secondary_tensor": ASSIGNED,
        "ds_shape": ASSIGNED,
        "ds_status": ASSIGNED,
        "ds_summary": ASSIGNED,
        "ds_tensor": ASSIGNED,
        "ds_zero_param_process_group": ASSIGNED,
        "ds_zero_partition_world_size": Since((0, 19, 3), ASSIGNED),
        "final_location": ASSIGNED,
        "partition_numel": ASSIGNED,
    },
    "deepspeed.runtime.zero.partition_parameters:Init": {
        "_convert_to_deepspeed_param": "(self, param)",
        "_ensure_availability_of_partitioned_params": "(self, params)",
    },
    "deepspeed.runtime.zero.partition_parameters:ZeroParamStatus": {
        "AVAILABLE": EXISTS,
        "INFLIGHT": EXISTS,
        "NOT_AVAILABLE": EXISTS,
    },
    "deepspeed.runtime.zero.stage_1_and_2": {
        "all_gather_dp_groups": (
            "(groups_flat, partitioned_param_groups, dp_process_group, "
            "start_alignment_factor, allgather_bucket_size)"
        ),
        "get_accelerator": EXISTS,
        "_zero_padding": Since((0, 19, 7), ASSIGNED),
    },
    "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer": {
        **_OF_BOTH_OPTIMIZERS,
        "__init__": Takes(
            (
                "init_optimizer",
                "allgather_bucket_size",
                "dp_process_group",
                "has_moe_layers",
                *_BUILT_WITH,
            )
        ),
        "_finalize_cpu_offload_gradient_accumulation": Since((0, 19, 5), "(self)"),
        "_get_compact_grad_partition_slice": Since(
            (0, 19, 8), "(self, group_idx, partition_id, param_id, num_elements)"
        ),
        "_get_preflattened_grad_partition": Since((0, 19, 2), "(self, group_idx)"),
        "_lazy_init_hp_params_optimizer_state": "(self)",
        "_link_all_hp_params": "(self)",
        "_load_legacy_checkpoint": EXISTS,
        "_optimizer_step": "(self, group_no)",
        "_update_model_bit16_weights": "(self, group_index)",
        "_use_compact_grad_partition_buffer": Since((0, 19, 8), "(self, group_idx)"),
        "clear_grad_attribute": "(self, param)",
        "complete_grad_norm_calculation_for_cpu_offload": "(self, params)",
        "copy_grads_in_partition": Takes(("param",)),
        "create_gradient_handling_hooks": "(self)",
        "flatten_dense_tensors_aligned": Takes(("tensor_list", "alignment", "use_cpu_data")),
        "get_data_parallel_partitions": "(self, tensor, group_id)",
        "get_gradient_for_reduction": "(self, param)",
        "get_param_id": "(self, param)",
        "initialize_gradient_partitioning_data_structures": "(self)",
        "reduce_ipg_grads": "(self, comm_dtype)",
        "is_gradient_accumulation_boundary": Since((0, 19, 5), "(self)"),
        "unscale_and_clip_grads": "(self, grad_groups_flat, total_norm)",
        "update_lp_params": "(self)",
        "overlap_comm": ASSIGNED,
        "_hp_optimizer_states_linked": ASSIGNED,
        "_offload_gradient_safety_enabled": Since((0, 19, 8), ASSIGNED),
        "all_grad_tensors": ASSIGNED,
        "bit16_groups": ASSIGNED,
        "check_grad_overflow": ASSIGNED,
        "bit16_groups_flat": ASSIGNED,
        "cpu_offload": ASSIGNED,
        "grad_position": ASSIGNED,
        "has_moe_layers": ASSIGNED,
        "ipg_buckets": ASSIGNED,
        "local_overflow": ASSIGNED,
        "micro_step_id": ASSIGNED,
        "mpu": ASSIGNED,
        "parallel_partitioned_bit16_groups": ASSIGNED,
        "params_in_partition": ASSIGNED,
        "param_buffer_of_bit16_for_cpu_offload_groups": ASSIGNED,
        "partition_gradients": ASSIGNED,
        "ready_for_gradients": ASSIGNED,
        "real_dp_process_group": ASSIGNED,
        "round_robin_bit16_groups": ASSIGNED,
        "round_robin_bit16_padding": Since((0, 19, 7), ASSIGNED),
        "single_partition_of_fp32_groups": ASSIGNED,
        "temp_grad_buffer_for_cpu_offload": ASSIGNED,
        "temp_grad_buffer_for_gpu_offload": ASSIGNED,
        "zero_stage_string": ASSIGNED,
    },
    "deepspeed.runtime.zero.parameter_offload:DeepSpeedZeRoOffload": {
        "_DeepSpeedZeRoOffload__allgather_stream": ASSIGNED,
    },
    "deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3": {
        **_OF_BOTH_OPTIMIZERS,
        "__init__": Takes(("module", "init_optimizer", "offload_ratio", *_BUILT_WITH)),
        "_constant_buffered_norm2": Takes(("input",)),
        "_create_fp32_partitions": "(self)",
        "_finalize_offload_gradient_accumulation": Since((0, 19, 5), "(self)"),
        "_get_fp32_grad_state_partition": "(self, param, release_swap_buffers)",
        "_get_fp32_opt_state_partition": EXISTS,
        "_get_param_partition_rank": Since((0, 19, 3), "(self, param)"),
        "_optimizer_step": "(self, sub_group_id)",
        "_overflow_check_and_loss_scale_update": EXISTS,
        "_partition_all_parameters": "(self)",
        "_rigid_load_state_dict": EXISTS,
        "complete_grad_norm_calculation_for_cpu_offload": "(self, params)",
        "empty_partition_cache": "(self)",
        "get_fp32_grad_partitions": "(self)",
        "get_param_id": "(self, param)",
        "invalidate_secondary_tensor": "(self)",
        "is_gradient_accumulation_boundary": Since((0, 19, 5), "(self)"),
        "partition_grads": "(self, params_to_release, grad_partitions)",
        "set_fp32_grad_for_param": "(self, value, param)",
        "unscale_and_clip_grads": "(self, sub_group_id, total_norm)",
        "update_fp32_grad_for_param_vectorized": "(self, update_func, param_list)",
        "deepspeed_adam_offload": ASSIGNED,
        "fp16_groups": ASSIGNED,
        "fp16_partitioned_groups_flat": ASSIGNED,
        "fp32_partitioned_groups_flat": ASSIGNED,
        "grad_partitions_flat_buffer": ASSIGNED,
        "grad_position": ASSIGNED,
        "inf_or_nan_tracker": ASSIGNED,
        "lp_grad_partitions_flat_pin_buffers": ASSIGNED,
        "lp_param_contiguous_pin_buffer": ASSIGNED,
        "micro_step_id": ASSIGNED,
        "model_parallel_group": ASSIGNED,
        "module": ASSIGNED,
        "norm_for_param_grads": ASSIGNED,
        "offload_optimizer": ASSIGNED,
        "offload_optimizer_pin_memory": ASSIGNED,
        "offload_param": ASSIGNED,
        "parameter_offload": ASSIGNED,
        "persistent_parameters": ASSIGNED,
        "sub_group_to_group_id": ASSIGNED,
        "zero_hpz_partition_size": ASSIGNED,
    },
    "deepspeed.utils.groups": {
        "_get_expert_parallel_group_dict": "()",
        "_get_zero_param_intra_parallel_group": "()",
    },
    "deepspeed.utils.mixed_precision_linkage": {"_hp_mapping": ASSIGNED},
    "deepspeed.utils.tensor_fragment:tensor_fragment": {
        "get_hp_fragment": "(self, optim_state_key)",
        "get_hp_fragment_address": "(self)",
        "get_lp_grad_fragment": "(self, index_in_param_group)",
    },
    "deepspeed.utils.timer:ThroughputTimer": {
        "__init__": "(self, config, batch_size, start_step, "
        "steps_per_output, monitor_memory, logging_fn)",
        "start": "(self)",
        "started": ASSIGNED,
        "stop": "(self, global_step, report_speed)",
    },
}
"""Class (``module:Class``) or module -> name of a member -> what we expect of it."""


def release() -> tuple[int, int, int]:
    """The installed DeepSpeed's version."""
    deepspeed = importlib.import_module("deepspeed")
    return deepspeed.__version_major__, deepspeed.__version_minor__, deepspeed.__version_patch__


def expected_members(owner_name: str) -> dict[str, str | Takes]:
    """What `CONTRACT` expects of a class or module of the installed release, by member."""
    found, installed = {}, release()
    for name, expected in CONTRACT[owner_name].items():
        if not isinstance(expected, Since):
            found[name] = expected
        elif installed >= expected.release:
            found[name] = expected.expected
    return found


def broken() -> list[str]:
    """Compare the installed DeepSpeed with `CONTRACT`; return one line per member that differs.

    Only a test compares `ASSIGNED` members: it reads DeepSpeed's bytecode.
    """
    found = []
    for owner_name in CONTRACT:
        module_name, _, class_name = owner_name.partition(":")
        try:
            owner = importlib.import_module(module_name)
            owner = getattr(owner, class_name) if class_name else owner
        except (ImportError, AttributeError):
            found.append(f"{owner_name} does not exist")
            continue
        for name, expected in expected_members(owner_name).items():
            if expected != ASSIGNED and (difference := _difference(owner, name, expected)):
                found.append(f"{owner_name}.{name} {difference}")
    return found


def _difference(owner: Any, name: str, expected: str | Takes) -> str:
    """Say how a member that is not `ASSIGNED` differs from what is expected; empty if it does
    not."""
    try:
        member = inspect.getattr_static(owner, name)
    except AttributeError:
        return "does not exist"
    if expected == EXISTS:
        return ""
    parameters = tuple(inspect.signature(undecorated(member)).parameters)
    if isinstance(expected, Takes):
        lacking = [parameter for parameter in expected.names if parameter not in parameters]
        return f"takes no parameter {', '.join(lacking)}" if lacking else ""
    found = f"({', '.join(parameters)})"
    return "" if found == expected else f"takes {found}, expected {expected}"


def undecorated(member: Any) -> Any:
    """Return the function inside a ``(*args, **kwargs)`` decorator, such as DeepSpeed's for
    profiler ranges; otherwise `member`."""
    cells = [cell.cell_contents for cell in getattr(member, "__closure__", None) or ()]
    functions = [cell for cell in cells if inspect.isfunction(cell)]
    takes_anything = tuple(inspect.signature(member).parameters) == ("args", "kwargs")
    return functions[0] if takes_anything and len(functions) == 1 else member
