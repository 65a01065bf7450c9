"""What determines a run's memory: its settings, read from a DeepSpeed config file or listed as the
ways to train, and written as a config. Plain values; only `read_config` imports DeepSpeed."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from deepspeed_ext.commands.memory.model import Machine, Model, known
from deepspeed_ext.config import FlattenTier, ZenFlowConfig
from deepspeed_ext.config.file import count_in, read_json, section_of
from deepspeed_ext.errors import ConfigError
from deepspeed_ext.flatten.plan import flat_numel
from deepspeed_ext.zenflow.plan.decide import decide
from deepspeed_ext.zenflow.plan.facts import Caller, RankFacts, Run, ZenFlowFacts, reducing_bytes
from deepspeed_ext.zenflow.plan.places import Copies, Place
from deepspeed_ext.zenflow.plan.plan import ZenFlowPlan
from deepspeed_ext.zenflow.worker.kernel.adam_pass import ADAM_STATE
from deepspeed_ext.zenflow.worker.kernel.passes import StateLayout

_LISTED = 32
"""Most equal partitions that are planned one by one, to the byte."""
_ALIGNMENT = 2
"""Elements per rank to which DeepSpeed aligns a flat buffer of stages 1 and 2."""


@dataclass(frozen=True)
class Setup:
    """A run's settings. The defaults are DeepSpeed's; sizes are in elements.

    Attributes:
        offload: ``offload_optimizer`` on the CPU, without ZenFlow.
        zenflow: the ``zenflow`` section; None: plain ZeRO.
        accumulation: micro-steps per optimizer step.
        sums: ``data_types.grad_accum_dtype``, "fp32" or "bf16"; None: not given, so plain ZeRO
            accumulates gradients in the weights' dtype, ZenFlow in fp32.
        fused_adam: the optimizer has no temporaries (DeepSpeed's FusedAdam and CPUAdam); False:
            torch's.
        pins: ``offload_optimizer.pin_memory``.
        rounds_pinned: each array that torch page-locks is rounded up to a power of two, as on CUDA.
            ZenFlow's arena is not rounded.
        offload_param: ``offload_param`` on the CPU.
        host_share: ``offload_optimizer.ratio``, with ZenFlow; None: the run may choose it.
        gathers_on_save: ``stage3_gather_16bit_weights_on_model_save``.
        others: the ``zero_optimization`` fields of the same names.
    """

    stage: int = 1
    offload: bool = False
    zenflow: ZenFlowConfig | None = None
    accumulation: int = 1
    sums: str | None = None
    fused_adam: bool = True
    pins: bool = False
    rounds_pinned: bool = True
    offload_param: bool = False
    host_share: float | None = None
    layout: StateLayout = ADAM_STATE
    reduce_bucket_size: int = 500_000_000
    overlap_comm: bool | None = None
    sub_group_size: int = 1_000_000_000
    max_live_parameters: int = 1_000_000_000
    max_reuse_distance: int = 1_000_000_000
    prefetch_bucket_size: int = 50_000_000
    stage3_allgather_single_param: bool = False
    flatten_tier: FlattenTier | None = None
    gathers_on_save: bool = False

    @property
    def partitions_weights(self) -> bool:
        """Whether the 16-bit weights are partitioned, too: at stage 3."""
        return self.stage == 3

    @property
    def weights(self) -> Place:
        return Place.HOST if self.offload_param and self.partitions_weights else Place.ACCELERATOR

    @property
    def overlaps(self) -> bool:
        """Whether gradients are reduced during backward; by default only at stage 3."""
        return self.partitions_weights if self.overlap_comm is None else self.overlap_comm

    @property
    def buckets(self) -> list[int]:
        """Elements of each reduction bucket: at stages 1 and 2 two alternate during backward."""
        return [self.reduce_bucket_size] * (2 if self.overlaps and self.stage < 3 else 1)

    def accumulation_dtype(self, model: Model) -> str:
        ours = self.zenflow is not None and self.accumulation > 1 and self.sums != "bf16"
        return "float32" if ours or self.sums == "fp32" else model.dtype

    def partitions(self, model: Model, machine: Machine) -> list[Run]:
        """This rank's partitions in order, with padding: one at stages 1 and 2, one per sub-group
        at stage 3, whose parameters' own padding of a few elements is not counted."""
        alignment = machine.ranks * (1 if self.partitions_weights else _ALIGNMENT)
        numel = flat_numel(model.params, alignment) // machine.ranks
        size = (self.partitions_weights and self.sub_group_size) or numel
        whole, rest = divmod(numel, size)
        equal = [Run(size)] * whole if whole <= _LISTED else [Run(size, whole)]
        return [*equal, *([Run(rest)] if rest else [])]

    def partition_numel(self, model: Model, machine: Machine) -> int:
        return sum(run.numel * run.times for run in self.partitions(model, machine))

    def caller(self, model: Model, machine: Machine) -> Caller:
        """The ZeRO optimizer around ZenFlow."""
        dtypes = model.dtype, self.accumulation_dtype(model)
        shards = machine.ranks if self.partitions_weights else 0
        return Caller(
            *dtypes,
            self.weights,
            takes_gradients=self.stage != 1,
            partitions_weights=self.partitions_weights,
            bucket_bytes=reducing_bytes(*dtypes, self.buckets, model.params, model.largest, shards),
            ranks=machine.ranks,
            asks_for_fp32=self.sums == "fp32",
        )

    def zenflow_plan(self, model: Model, machine: Machine, mine: RankFacts) -> ZenFlowPlan:
        """The plan that a rank makes when it starts, where each rank is as `mine`."""
        assert self.zenflow is not None
        ranks, caller = (mine,) * machine.per_host, self.caller(model, machine)
        facts = ZenFlowFacts(ranks, caller, layout=self.layout)
        return decide(facts, self.zenflow, ratio=self.host_share)


# -- the ways to train -----------------------------------------------------------------------------


def ways(accumulation: int = 1) -> Iterator[Setup]:
    """Each way to train: plain ZeRO, ZeRO-Offload, and ZenFlow with each rule, dtype of moments,
    and place of gradients and weights. Gradients on the accelerator: the run chooses its share.
    Stage 1 is left out: it is as fast as stage 2 but needs more memory."""
    given: list[dict[str, Any]] = [
        {"update_rule": rule} | ({} if dtype == "float32" else {"state_dtype": dtype})
        for dtype in known()["moments"]
        for rule in ("exact", "predictive")
    ]
    sections = [ZenFlowConfig(**section) for section in given]
    summed = (None, "bf16") if accumulation > 1 else (None,)
    # without gathering, a trainer saves no weights of stage 3 that load
    for bare in (Setup(2), Setup(3, gathers_on_save=True)):
        plain = replace(bare, accumulation=accumulation)
        offload = replace(plain, offload=True, pins=True)
        yield from (plain, offload)
        for section in sections:
            yield replace(plain, zenflow=section)
            leaves = section.model_copy(update={"gradients_on_host": True})
            yield from (replace(plain, sums=sums, zenflow=leaves) for sums in summed)
    lifts = replace(offload, offload_param=True)  # at stage 3, the last
    yield lifts
    for section in sections:
        ours = replace(lifts, offload=False, zenflow=section)
        yield from (replace(ours, sums=sums) for sums in summed)


def inexactness(setup: Setup) -> int:
    """How far moments are from fp32: 0, 1 (bf16) or 2 (8 bits)."""
    dtypes = list(known()["moments"])
    return 0 if setup.zenflow is None else dtypes.index(setup.zenflow.state_dtype)


def cost_of(setup: Setup) -> str | None:
    """What a way costs in loss; None: nothing, its steps are those of the optimizer to the bit."""
    if setup.zenflow is None or (setup.zenflow.rule == "exact" and not inexactness(setup)):
        return None
    return str(known()["moments"][setup.zenflow.state_dtype]["cost"])


def name_of(setup: Setup, plan: ZenFlowPlan | None = None) -> str:
    """The way in a few words, without its stage; ZenFlow's `plan` says where gradients are."""
    zenflow, is_on_host = setup.zenflow, setup.weights is Place.HOST
    parts = ["ZeRO-Offload" if setup.offload else "ZeRO"]
    if zenflow is not None:
        parts = [known()["rules"][zenflow.rule], known()["moments"][zenflow.state_dtype]["name"]]
        if plan is not None and plan.host_share < 1.0:
            parts.append(f"{1 - plan.host_share:.0%} on the GPU")
        leaves = zenflow.gradients_on_host or (plan is not None and plan.copies is Copies.WEIGHTS)
        parts += ["gradients on host"] if leaves and not is_on_host else []
    parts += ["weights on host"] if is_on_host else []
    of = " in bf16" if setup.sums == "bf16" else ""
    parts += [f"{setup.accumulation} micro-steps{of}"] if setup.accumulation > 1 else []
    return ", ".join(parts)


# -- configs ---------------------------------------------------------------------------------------


def config_of(setup: Setup, dtype: str, reader: str = "script") -> dict[str, Any]:
    """A DeepSpeed config for a run with weights in `dtype`, for who reads it: "script" gets numbers
    to edit, "trainer" (on Accelerate) "auto" for all that its arguments set."""
    (batch, optimizer), is_script = known()["configs"][reader], reader == "script"
    steps = {"gradient_accumulation_steps": setup.accumulation} if is_script else {}
    enabled = {"enabled": True if is_script else "auto"}
    precision = {"bfloat16": {"bf16": enabled}, "float16": {"fp16": enabled}}.get(dtype, {})
    return {**batch, **steps, **precision, **optimizer, **sections_of(setup)}


def sections_of(setup: Setup) -> dict[str, Any]:
    """What makes a config a way: ``zero_optimization``, and ``data_types`` for its sums."""
    on_cpu, zenflow = {"device": "cpu", "pin_memory": setup.pins}, setup.zenflow
    every = {
        "stage": setup.stage,
        "stage3_gather_16bit_weights_on_model_save": setup.gathers_on_save or None,
        "offload_optimizer": on_cpu if setup.offload or setup.offload_param else None,
        "offload_param": on_cpu if setup.offload_param else None,
        "zenflow": zenflow and zenflow.model_dump(exclude_unset=True),
    }
    zero = {name: value for name, value in every.items() if value is not None}
    summed = {} if setup.sums is None else {"data_types": {"grad_accum_dtype": setup.sums}}
    return {"zero_optimization": zero, **summed}


_SUMS = {"fp32": "fp32", "float32": "fp32", "bf16": "bf16", "bfloat16": "bf16"}


def read_config(path: str, ranks: int) -> tuple[Setup, str, list[str]]:
    """A run's settings, the dtype of its weights, and notes on what is assumed, from a config file,
    read with the pydantic model that a run uses. The value "auto" means the default.

    Raises:
        ConfigError: the file cannot be read, or asks for a feature whose memory cannot be computed.
    """
    from deepspeed_ext.adapter.zero_config import ZeroConfig, require_supported
    from deepspeed_ext.zenflow.optimizers import LAYOUTS

    config = read_json(path)
    section, optimizer = section_of(config, "zero_optimization"), section_of(config, "optimizer")
    zero = ZeroConfig(**section)
    if (stage := section.get("stage", 0)) == "auto" or int(zero.stage) == 0:
        raise ConfigError(f"zero_optimization.stage is {stage}: plan --memory needs 1, 2 or 3")
    require_supported(zero)
    bf16 = section_of(config, "bf16") or section_of(config, "bfloat16")
    fp16 = section_of(config, "fp16")
    _require_known(zero, section, bf16 | fp16)
    dtype, notes = _dtype(bf16.get("enabled"), fp16.get("enabled"))
    name = str(optimizer.get("type", "")).lower()
    if name and "adam" not in name and name not in LAYOUTS:
        notes.append(f"the optimizer is {name}: two fp32 moments are counted, as for Adam")
    left = sorted(field for field, value in section.items() if value == "auto")
    notes += [f"counted with DeepSpeed's default, because it is auto: {field}" for field in left]
    offload = zero.offload_optimizer
    on_host = offload is not None and offload.device == "cpu"
    of_torch = section_of(optimizer, "params").get("torch_adam") is True
    zenflow = zero.zenflow_with(bf16.get("bf16_optimizer_states") is True)
    summed, overlaps = section_of(config, "data_types"), section.get("overlap_comm")
    names = [field.name for field in fields(Setup) if hasattr(zero, field.name)]
    given: dict[str, Any] = {name: getattr(zero, name) for name in names} | dict(
        stage=int(zero.stage),
        offload=on_host and zenflow is None,
        zenflow=zenflow and ZenFlowConfig(**zenflow.model_dump(exclude_unset=True)),
        accumulation=_accumulation(config, ranks),
        sums=_SUMS.get(str(summed.get("grad_accum_dtype"))),
        fused_adam=not of_torch and (name in ("adam", "adamw", "lion") or on_host),
        pins=on_host and offload is not None and offload.pin_memory,
        offload_param=zero.offload_param is not None and zero.offload_param.device == "cpu",
        host_share=None if zero.host_ratio == "auto" else zero.host_ratio,
        layout=LAYOUTS.get(name, ADAM_STATE),
        overlap_comm=overlaps if isinstance(overlaps, bool) else None,
        gathers_on_save=zero.gather_16bit_weights_on_model_save,
    )
    return Setup(**given), dtype, notes


def _require_known(zero: Any, section: Mapping[str, Any], precision: Mapping[str, Any]) -> None:
    from deepspeed_ext.adapter.zero_config import REPLACED

    offload, param, ratio = zero.offload_optimizer, zero.offload_param, zero.host_ratio
    quantized = [name for name, value in section.items() if "quantized" in name and value is True]
    unknown = {
        'offload_param.device = "nvme"': param is not None and param.device == "nvme",
        'offload_optimizer.device = "nvme"': offload is not None and offload.device == "nvme",
        "contiguous_gradients: false": section.get("contiguous_gradients") is False,
        "quantized weights or gradients": bool(quantized),
        "zero_hpz_partition_size above 1": zero.zero_hpz_partition_size > 1,
    }
    if zero.zenflow is None:  # it has a share of its own and replaces the others
        unknown["offload_optimizer.ratio below 1 without zenflow"] = ratio not in (None, 1)
        unknown["offload_optimizer.super_offload"] = offload is not None and offload.super_offload
        unknown |= {name: precision.get(name.rpartition(".")[2]) is True for name in REPLACED}
    if found := [name for name, given in unknown.items() if given]:
        raise ConfigError(
            f"plan --memory cannot compute the memory of {' and '.join(found)}: plan without it"
        )


def _dtype(bf16: Any, fp16: Any) -> tuple[str, list[str]]:
    """Dtype of the weights by what enables 16 bits, and a note if that is left to the Trainer."""
    if True not in (bf16, fp16) and "auto" in (bf16, fp16):
        return "bfloat16", ["the dtype is auto: counted as bf16, unless --dtype says otherwise"]
    return "bfloat16" if bf16 is True else "float16" if fp16 is True else "float32", []


def _accumulation(config: Mapping[str, Any], ranks: int) -> int:
    """Micro-steps per optimizer step: as given, or the batch size divided by the size of all ranks'
    micro-batches."""
    steps = count_in(config, "gradient_accumulation_steps")
    batch = count_in(config, "train_batch_size")
    micro = count_in(config, "train_micro_batch_size_per_gpu")
    if steps is not None or batch is None or micro is None:
        return steps or 1
    return math.ceil(batch / (micro * ranks))
