"""The only module that imports private parts of DeepSpeed.

It has the supported versions, the classes that we subclass and the names that we replace. `check`
compares the installed DeepSpeed with `contract.json`, so that start-up fails if DeepSpeed renames a
method, instead of our override silently having no effect.

That file is data: class (``module:Class``) or module, then name of a member, then its form:
``"(self, closure)"`` a function with these parameters in this order, perhaps among others;
``"exists"`` anything; ``"assigned"`` an attribute that DeepSpeed's methods assign (for a module,
one that its functions set on any object). ``since 0.19.8`` marks what older releases lack.
`tests.support.contract` writes it from our sources, and a test compares it with them.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import json
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import deepspeed
import deepspeed.ops as ops_module
import torch
from deepspeed.accelerator import set_accelerator
from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator
from deepspeed.checkpoint import constants as checkpoint_keys
from deepspeed.ops.op_builder.builder import OpBuilder
from deepspeed.runtime import engine as engine_module
from deepspeed.runtime.base_optimizer import BackwardHookStateManager, ZeROOptimizer
from deepspeed.runtime.checkpoint_engine import TorchCheckpointEngine
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.hybrid_engine import DeepSpeedHybridEngine
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.pipe.module import PipelineModule
from deepspeed.runtime.superoffload import superoffload_stage3 as _superoffload_stage3
from deepspeed.runtime.utils import is_model_parallel_parameter
from deepspeed.runtime.zenflow.zenflow_config import ZenFlowConfig as DeepSpeedZenFlowConfig
from deepspeed.runtime.zero import config as zero_config_module
from deepspeed.runtime.zero import stage3 as stage3_module
from deepspeed.runtime.zero import stage_1_and_2 as stage_1_and_2_module
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from deepspeed.runtime.zero.offload_config import (
    DeepSpeedZeroOffloadOptimizerConfig,
    OffloadDeviceEnum,
    OffloadStateTypeEnum,
)
from deepspeed.runtime.zero.partition_parameters import Init
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus as ParameterStatus
from deepspeed.runtime.zero.partition_parameters import get_allgather_dtype as communication_dtype
from deepspeed.runtime.zero.stage3 import (
    DeepSpeedZeroOptimizer_Stage3 as DeepSpeedZeroOptimizerStage3,
)
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from deepspeed.utils import groups as groups_module
from deepspeed.utils.bwc import bwc_tensor_model_parallel_world_size
from deepspeed.utils.tensor_fragment import safe_get_full_fp32_param as master_of
from deepspeed.utils.tensor_fragment import tensor_fragment as TensorFragment  # noqa: N812 (it is a class)
from deepspeed.utils.timer import ThroughputTimer

from deepspeed_ext.errors import UpstreamError
from deepspeed_ext.runtime import files, launch
from deepspeed_ext.runtime.backend import get_accelerator, local_rank
from deepspeed_ext.runtime.log import logger

PartitionedParameter = Any
"""A ``torch.nn.Parameter`` converted by ``zero.Init``, with its ``ds_*`` attributes."""

comm_module = importlib.import_module("deepspeed.comm.comm")
# as an attribute, it is torch itself
torch_backend_module = importlib.import_module("deepspeed.comm.torch")

SUPPORTED_FROM = (0, 19, 6)
SUPPORTED_BELOW = (0, 20, 0)


@functools.cache
def check() -> None:
    """Check that the installed DeepSpeed is supported; once per process.

    Raises:
        UpstreamError: the version is outside the supported range, or a member of the contract
            differs.
    """
    if not SUPPORTED_FROM <= release() < SUPPORTED_BELOW:
        first, below = (".".join(map(str, bound)) for bound in (SUPPORTED_FROM, SUPPORTED_BELOW))
        nearest = f"deepspeed=={first}" if release() < SUPPORTED_FROM else f"deepspeed<{below}"
        raise UpstreamError(
            f"deepspeed_ext supports DeepSpeed from {first} to below {below}, found "
            f"{deepspeed.__version__}; install the nearest: pip install '{nearest}'"
        )
    if lines := broken():
        raise UpstreamError(
            f"DeepSpeed {deepspeed.__version__} differs from what deepspeed_ext relies on: "
            f"{'; '.join(lines)}. "
            "Install the DeepSpeed version named in the README, or a newer deepspeed_ext"
        )


@dataclass(frozen=True)
class Swap:
    """An attribute of a module or an object, and what to replace it with."""

    owner: Any
    name: str
    replacement: Any


_swap_lock = threading.Lock()


@contextmanager
def swapped(*swaps: Swap) -> Iterator[None]:
    """Replace the attributes of all `swaps` inside the block; restore them afterwards, even after
    an error."""
    with _swap_lock:
        before = [(swap.owner, swap.name, getattr(swap.owner, swap.name)) for swap in swaps]
        for swap in swaps:
            setattr(swap.owner, swap.name, swap.replacement)
    try:
        yield
    finally:
        with _swap_lock:
            for owner, name, original in reversed(before):
                setattr(owner, name, original)


def entry_swaps(
    initialize: Callable[[Callable[..., Any]], Callable[..., Any]],
    engine: type[DeepSpeedEngine],
    hybrid_engine: type[DeepSpeedHybridEngine],
    pipeline_engine: type[PipelineEngine],
    config: type[DeepSpeedConfig],
    zero_config: type[DeepSpeedZeroConfig],
) -> list[Swap]:
    """The swaps that switch the extension on: ``deepspeed.initialize``, wrapped by `initialize`;
    the classes of its engines, its config and the ZeRO section; how operators are compiled, without
    the one that no training needs; and how ranks are found without a launcher."""
    return [
        Swap(deepspeed, "initialize", initialize(deepspeed.initialize)),
        Swap(deepspeed, "DeepSpeedEngine", engine),
        Swap(deepspeed, "DeepSpeedHybridEngine", hybrid_engine),
        Swap(deepspeed, "PipelineEngine", pipeline_engine),
        Swap(deepspeed, "DeepSpeedConfig", config),
        zero_section_class(zero_config),
        no_shared_buffers(),
        announced_builds(),
        ranks_without_mpi(),
    ]


def ranks_without_mpi() -> Swap:
    """Return a swap for ``mpi_discovery``, which DeepSpeed calls if no launcher has set a rank. It
    needs mpi4py; without that, the replacement reads the variables of srun and MPI, and makes a
    process that was started alone rank 0 of 1.

    This happens when communication begins and not before, because launchers inside a script, such
    as Lightning's, take a rank in the environment as a sign that all processes have started.
    """
    discover = comm_module.mpi_discovery

    @functools.wraps(discover)
    def discovered(*args: Any, **kwargs: Any) -> None:
        if importlib.util.find_spec("mpi4py") is not None or not launch.find_rank():
            discover(*args, **kwargs)

    return Swap(comm_module, "mpi_discovery", discovered)


def no_shared_buffers() -> Swap:
    """Return a swap that leaves out the operator of DeepSpeed's all-reduce for inference on CPUs,
    which then uses torch's: it takes minutes of two cores to compile, and training does not use
    it."""
    return Swap(torch_backend_module, "build_shm_op", lambda: None)


def announced_builds() -> Swap:
    """Return a swap for the method that compiles or loads an operator of DeepSpeed: the first rank
    of this host names it and a lock that it waits for, and torch prints nothing. If a build fails,
    the error contains the compiler's output."""
    jit_load = OpBuilder.jit_load

    @functools.wraps(jit_load)
    def announced(self: OpBuilder, verbose: bool = True) -> Any:
        if local_rank() == 0:
            logger.info(
                f"loading DeepSpeed's {self.name}; the first time it is compiled, for minutes"
            )
        for lock, seconds in files.abandoned_locks() if local_rank() == 0 else ():
            if lock.parent.name == self.name:
                logger.warning(
                    f"waiting for the lock {lock}, {seconds / 60:.0f} minutes old, which a killed "
                    "build may have left: delete it, unless the operator is being built now"
                )
        return jit_load(self, verbose=False)

    return Swap(OpBuilder, "jit_load", announced)


def zero_section_class(zero_config: type[DeepSpeedZeroConfig]) -> Swap:
    return Swap(zero_config_module, "DeepSpeedZeroConfig", zero_config)


def optimizer_class(stage_1_and_2: Callable[..., DeepSpeedZeroOptimizer]) -> Swap:
    """Return a swap for the name by which ``DeepSpeedEngine._configure_zero_optimizer`` finds the
    stage 1/2 class."""
    return Swap(engine_module, "DeepSpeedZeroOptimizer", stage_1_and_2)


def stage3_optimizer_class(stage3: Callable[..., DeepSpeedZeroOptimizerStage3]) -> Swap:
    """The same of stage 3. That method also imports SuperOffload, whose optimizer is a subclass;
    this module loads it before the swap."""
    return Swap(stage3_module, "DeepSpeedZeroOptimizer_Stage3", stage3)


def throughput_timer(timer: Callable[..., ThroughputTimer]) -> Swap:
    """Return a swap for the name by which the constructor of ``DeepSpeedEngine`` finds its
    throughput timer."""
    return Swap(engine_module, "ThroughputTimer", timer)


def keep_masters_on_host(arguments: dict[str, Any], *, sums_in_fp32: bool) -> None:
    """Let a ZeRO optimizer that is built with `arguments` have its masters in pageable host memory,
    and sum the gradients of several micro-steps in fp32, or as DeepSpeed would."""
    arguments["offload_optimizer_config"] = DeepSpeedZeroOffloadOptimizerConfig(
        device=OffloadDeviceEnum.cpu, pin_memory=False
    )
    if sums_in_fp32 and arguments["gradient_accumulation_steps"] > 1:
        arguments["gradient_accumulation_dtype"] = torch.float32


def counted_alike(params: Sequence[Any]) -> bool:
    """Whether DeepSpeed's gradient norm counts either all `params` or none of them on this rank."""
    kinds = {
        (bool(getattr(p, "ds_pipe_replicated", False)), is_model_parallel_parameter(p))
        for p in params
    }
    return len(kinds) <= 1


def pipeline_topology(model: Any) -> Any:
    """Return the `mpu` that ``deepspeed.initialize`` uses for a pipeline's `model`; None for any
    other model."""
    return model.mpu() if isinstance(model, PipelineModule) else None


_MODEL_GROUPS = (
    "get_sequence_data_parallel_group",
    "get_data_parallel_group",
    "get_model_parallel_group",
    "get_tensor_model_parallel_group",
    "get_pipeline_model_parallel_group",
    "get_pipe_parallel_group",
    "get_context_parallel_group",
    "get_sequence_parallel_group",
)
"""The methods of an `mpu`, as DeepSpeed and Megatron name them."""


def model_groups(mpu: Any) -> dict[str, Any]:
    """Return the process groups of an `mpu` over which a model can be spread, by method."""
    methods = {name: getattr(mpu, name, None) for name in _MODEL_GROUPS}
    found = {name: method() for name, method in methods.items() if method is not None}
    return {name: group for name, group in found.items() if group is not None}


def later_groups(optimizer: Any) -> list[Any]:
    """Return this rank's groups that DeepSpeed first uses after the engine is built: those of
    experts, sorted by name, and that of secondary partitions (hpZ)."""
    found: list[Any] = []
    if getattr(optimizer, "has_moe_layers", False):
        experts: dict[str, Any] = groups_module._get_expert_parallel_group_dict()
        found += [experts[name] for name in sorted(experts)]
    if getattr(optimizer, "zero_hpz_partition_size", 1) > 1:
        found.append(groups_module._get_zero_param_intra_parallel_group())
    return found


def tensor_ranks(mpu: Any) -> int:
    return int(bwc_tensor_model_parallel_world_size(mpu))


def ties_stages(model: Any) -> bool:
    """Whether `model` is a pipeline whose stage on this rank shares a parameter with another
    stage."""
    return isinstance(model, PipelineModule) and bool(model.tied_comms)


class _RoomyAccelerator:
    """The accelerator, except that it always reports enough free memory for another flat buffer."""

    def __init__(self, accelerator: Any) -> None:
        self._accelerator = accelerator

    def __getattr__(self, name: str) -> Any:
        return getattr(self._accelerator, name)

    def available_memory(self, device_index: int | None = None) -> int:
        return sys.maxsize

    def pin_memory(self, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        if self._accelerator.is_pinned(tensor):  # DeepSpeed would copy it again
            return tensor
        return self._accelerator.pin_memory(tensor, *args, **kwargs)


def accelerator_branch_only() -> Swap:
    """Return a swap that keeps the stage 1/2 constructor from moving parameters through pageable
    host memory.

    For each group, that constructor compares its size with the accelerator's free memory (on
    NVIDIA: NVML's). If memory suffices, it always calls ``flatten_dense_tensors_aligned``, where
    our subclass makes the decision.
    """
    return Swap(
        stage_1_and_2_module, "get_accelerator", lambda: _RoomyAccelerator(get_accelerator())
    )


def before_gathers(notify: Callable[[Sequence[PartitionedParameter]], None]) -> None:
    """Call `notify` with the parameters of every gather, of any model, before DeepSpeed reads their
    partitions. Permanent, because closures of any ``zero.Init`` may call the method later."""
    original = Init._ensure_availability_of_partitioned_params

    @functools.wraps(original)
    def ensured(self: Init, params: Any) -> None:
        notify(params)
        original(self, params)

    Init._ensure_availability_of_partitioned_params = ensured


def prefetches_of(optimizer: DeepSpeedZeroOptimizerStage3) -> Callable[[bool], None]:
    """A function that lets the fetches of stage 3 prefetch as configured, or not at all."""
    coordinator = optimizer.parameter_offload.get_param_coordinator()
    bucket = "_PartitionedParameterCoordinator__prefetch_bucket_sz"
    numel = getattr(coordinator, bucket)
    return lambda allowed: setattr(coordinator, bucket, numel if allowed else 0)


def gather_stream(optimizer: DeepSpeedZeroOptimizerStage3) -> Any:
    """Return the stream on which stage 3 gathers parameters; it waits for no other stream."""
    return optimizer.parameter_offload._DeepSpeedZeRoOffload__allgather_stream


def pins_offload_buffers(offload_config: Any) -> bool:
    """Whether ``zero_optimization.offload_optimizer`` asks for page-locked host buffers."""
    return (
        offload_config is not None
        and offload_config.device != OffloadDeviceEnum.none
        and offload_config.pin_memory
    )


def is_on_nvme(param: PartitionedParameter) -> bool:
    """Whether the partition of `param` is swapped to NVMe between uses."""
    return param.ds_tensor.final_location == OffloadDeviceEnum.nvme


def is_zero_optimizer(optimizer: Any) -> bool:
    """Whether `optimizer` is DeepSpeed's optimizer of ZeRO stage 1, 2 or 3, or a subclass's."""
    return isinstance(optimizer, DeepSpeedZeroOptimizer | DeepSpeedZeroOptimizerStage3)


def is_stored_quantized(param: Any) -> bool:
    """Whether `param` is partitioned, and its partition is quantized."""
    return hasattr(getattr(param, "ds_tensor", None), "ds_quant_scale")


def is_quantized(param: PartitionedParameter, zero_config: DeepSpeedZeroConfig) -> bool:
    """Whether `param` is communicated quantized: it is stored so, or the config quantizes every
    all-gather."""
    return is_stored_quantized(param) or zero_config.zero_quantized_weights


def group_paddings(optimizer: Any) -> list[Sequence[int]]:
    """Elements of padding after each parameter of each group, at stages 1 and 2; 0 before
    0.19.7."""
    if hasattr(optimizer, "round_robin_bit16_padding"):
        return optimizer.round_robin_bit16_padding
    return [[0] * len(group) for group in optimizer.round_robin_bit16_groups]


def norm_dtype() -> torch.dtype:
    """The dtype in which DeepSpeed computes gradient norms: fp64, where the accelerator has it."""
    return torch.float64 if get_accelerator().is_fp64_supported() else torch.float32


def norm_shows_overflow() -> bool:
    """Whether a non-finite gradient norm skips the step as an overflow. Before 0.19.8 only
    ``check_overflow`` does, which runs before the norm, at stage 3 only with fp16."""
    return release() >= (0, 19, 8)


def fp16_on_any_cpu() -> None:
    """Let DeepSpeed train in fp16 on CPUs without native fp16; torch supports it, slowly."""

    class PatientCpu(CPU_Accelerator):
        def is_fp16_supported(self) -> bool:
            return True

    if get_accelerator().device_name() == "cpu":
        set_accelerator(PatientCpu())


# -- the contract ----------------------------------------------------------------------------------

EXISTS, ASSIGNED = "exists", "assigned"
PAGE = Path(__file__).with_name("contract.json")


def release() -> tuple[int, int, int]:
    return deepspeed.__version_major__, deepspeed.__version_minor__, deepspeed.__version_patch__


@functools.cache
def expected() -> dict[str, dict[str, str]]:
    """The contract with the installed release."""
    found: dict[str, dict[str, str]] = {}
    for owner, members in json.loads(PAGE.read_text()).items():
        for name, form in members.items():
            form, _, first = form.partition(" since ")
            if not first or release() >= tuple(map(int, first.split("."))):
                found.setdefault(owner, {})[name] = form
    return found


def broken() -> list[str]:
    """One line per member of the installed DeepSpeed that differs from the contract. Only a test
    compares `ASSIGNED` members: it reads DeepSpeed's bytecode."""
    lines = []
    for place, members in expected().items():
        try:
            owner = found_at(place)
        except (ImportError, AttributeError):
            lines.append(f"{place} does not exist")
            continue
        told = ((name, difference(owner, name, form)) for name, form in members.items())
        lines += [f"{place}.{name} {how}" for name, how in told if how]
    return lines


def found_at(place: str) -> Any:
    """The class or module that the contract names by `place`."""
    module, _, name = place.partition(":")
    owner = importlib.import_module(module)
    return getattr(owner, name) if name else owner


def difference(owner: Any, name: str, form: str) -> str:
    """How a member differs from its form; empty if it does not."""
    if form == ASSIGNED:
        return ""
    member = inspect.getattr_static(owner, name, None)
    if member is None or form == EXISTS:
        return "does not exist" if member is None else ""
    has = iter(found := list(inspect.signature(undecorated(member)).parameters))
    fits = all(parameter in has for parameter in form.strip("()").split(", ") if parameter)
    return "" if fits else f"takes ({', '.join(found)}), expected {form}"


def undecorated(member: Any) -> Any:
    """The function inside a ``(*args, **kwargs)`` decorator, such as DeepSpeed's for profiler
    ranges; otherwise `member`."""
    cells = [cell.cell_contents for cell in getattr(member, "__closure__", None) or ()]
    functions = [cell for cell in cells if inspect.isfunction(cell)]
    takes_anything = tuple(inspect.signature(member).parameters) == ("args", "kwargs")
    return functions[0] if takes_anything and len(functions) == 1 else member
