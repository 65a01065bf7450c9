"""What the acceptance trains: every mode that a checkpoint or a config may come from, by name."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

ALIKE = 0.05
"""How far losses of a retired mode may lie from the recorded ones, over the first loss."""


@dataclass(frozen=True)
class Variant:
    """One mode.

    Attributes:
        stages: of ZeRO; a run each.
        zenflow: fields of the ``zenflow`` section.
        ranks: numbers of ranks; a run each.
        device: "cpu" or "sim", the simulated accelerator.
        dtype: "bf16", "fp16" or "fp32".
        retired: its bits may change: its checkpoints load, and losses stay within `ALIKE`.
        zero: further fields of ``zero_optimization``.
        changes: to the rest of the config, by section.
    """

    stages: tuple[int, ...]
    zenflow: dict[str, Any] = field(default_factory=dict)
    ranks: tuple[int, ...] = (2,)
    device: str = "cpu"
    dtype: str = "bf16"
    accumulation: int = 1
    retired: bool = False
    zero: dict[str, Any] = field(default_factory=dict)
    changes: dict[str, dict[str, Any]] = field(default_factory=dict)

    def config(self, stage: int) -> dict[str, Any]:
        """The config of a run. Choices that are made by measuring are off."""
        zenflow = {"update_rule": "predictive", "full_warm_up_rounds": 2, "autotune": False}
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": self.accumulation,
            "gradient_clipping": 2.0,
            "steps_per_print": 10**9,
            "bf16": {"enabled": self.dtype == "bf16"},
            "fp16": {"enabled": self.dtype == "fp16"},
            "optimizer": {
                "type": "AdamW",
                "params": {"lr": 0.04, "weight_decay": 0.1, "torch_adam": True},
            },
            "zero_force_ds_cpu_optimizer": False,
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {
                "stage": stage,
                "zenflow": zenflow | self.zenflow,
                "core_binding": {"enabled": False},
                # several sub-groups, and parameters of both kinds
                **({"stage3_param_persistence_threshold": 20} if stage == 3 else {}),
                **({"sub_group_size": 400} if stage == 3 else {}),
                **self.zero,
            },
        }
        for section, fields in self.changes.items():
            config[section] = config.get(section, {}) | fields
        return config


INSIDE, HIDDEN, ON_HOST = (
    {"hide_transfers": hidden, "gradients_on_host": on_host}
    for hidden, on_host in ((False, False), (True, False), (False, True))
)
"""Where and when gradients leave a device."""
EXACT = {"update_rule": "exact"}
SELECTIVE = {
    "update_rule": "selective",
    "topk_ratio": 0.1,
    "select_block_size": 32,
    "select_interval": 4,
    "update_interval": 2,
    "overlap_step": True,
}
SYNCHRONOUS = {"overlap_step": False}
INT8 = {"state_dtype": "int8"}
BF16 = {"state_dtype": "bfloat16"}
SHARE = {"offload_optimizer": {"device": "cpu", "ratio": 0.4}}
LION = {"optimizer": {"type": "Lion", "params": {"lr": 0.01, "weight_decay": 0.1}}}
OVERFLOWS = {"fp16": {"initial_scale_power": 18, "loss_scale_window": 4, "hysteresis": 1}}
"""Steps are skipped at first, and each time after the scale has grown again."""

VARIANTS = {
    "predictive": Variant((1, 2, 3), ranks=(1, 2)),
    "predictive, fp32": Variant((2, 3), dtype="fp32"),
    "predictive, fp16 with skipped steps": Variant((2, 3), dtype="fp16", changes=OVERFLOWS),
    "predictive, accumulation": Variant((2, 3), accumulation=4),
    "predictive, bf16 moments": Variant((2, 3), BF16),
    "predictive, int8 moments": Variant((2, 3), INT8, (1, 2)),
    "predictive, share": Variant((2, 3), zero=SHARE),
    "predictive, share, int8 moments": Variant((2, 3), INT8, zero=SHARE),
    "predictive, Lion": Variant((2, 3), changes=LION),
    "synchronous": Variant((1, 2, 3), SYNCHRONOUS),
    "synchronous, bf16 moments": Variant((2,), SYNCHRONOUS | BF16),
    "synchronous, int8 moments": Variant((3,), SYNCHRONOUS | INT8),
    "synchronous, Lion": Variant((2,), SYNCHRONOUS, changes=LION),
    "exact": Variant((1, 2, 3), EXACT, (1, 2)),
    "exact, fp32": Variant((3,), EXACT, dtype="fp32"),
    "exact, fp16 with skipped steps": Variant((2, 3), EXACT, dtype="fp16", changes=OVERFLOWS),
    "exact, accumulation": Variant((2, 3), EXACT, accumulation=4),
    "exact, int8 moments": Variant((2, 3), EXACT | INT8),
    "exact, share": Variant((2, 3), EXACT, zero=SHARE),
    "exact, Lion": Variant((3,), EXACT, changes=LION),
    "device, copies in the step": Variant((1, 2, 3), INSIDE, device="sim"),
    "device, hidden copies": Variant((1, 2, 3), HIDDEN, device="sim"),
    "device, hidden copies, share": Variant((2, 3), HIDDEN, device="sim", zero=SHARE),
    "device, gradients on the host": Variant((2, 3), ON_HOST, device="sim"),
    # sums were rounded to bf16 when they were handed over
    "device, gradients on the host, accumulation, int8 moments": Variant(
        (2, 3), ON_HOST | INT8, device="sim", accumulation=4, retired=True
    ),
    "device, weights on the host": Variant(
        (3,), INSIDE, device="sim", zero={"offload_param": {"device": "cpu", "pin_memory": False}}
    ),
    "device, exact, hidden copies": Variant((2, 3), EXACT | HIDDEN, device="sim"),
    "device, exact, gradients on the host": Variant((2, 3), EXACT | ON_HOST, device="sim"),
    "device, exact, fp16 with skipped steps": Variant(
        (3,), EXACT | HIDDEN, device="sim", dtype="fp16", changes=OVERFLOWS
    ),
    "selective": Variant((1, 2, 3), SELECTIVE, (1, 2), retired=True),
    "selective, fp16 with skipped steps": Variant(
        (2,), SELECTIVE, dtype="fp16", changes=OVERFLOWS, retired=True
    ),
    "selective, synchronous": Variant((2, 3), SELECTIVE | SYNCHRONOUS, retired=True),
    "selective, state of hot blocks on the host": Variant(
        (2,), SELECTIVE | {"offload": True}, retired=True
    ),
    "selective, share": Variant((2, 3), SELECTIVE, zero=SHARE, retired=True),
    "device, selective": Variant((2, 3), SELECTIVE | INSIDE, device="sim", retired=True),
    "predictive, interval 4": Variant((2, 3), {"update_interval": 4}, retired=True),
    "predictive, interval 4, int8 moments": Variant(
        (2,), INT8 | {"update_interval": 4}, retired=True
    ),
    "predictive, measured interval": Variant((2,), {"update_interval": "measured"}, retired=True),
    "device, interval 2": Variant((2, 3), HIDDEN | {"update_interval": 2}, retired=True),
    "measured rule": Variant((2, 3), {"update_rule": "auto"}, retired=True),
    "weights arrive in the forward": Variant(
        (1, 2), {"weights_arrive_in_forward": True}, retired=True
    ),
    "exact, weights arrive in the forward": Variant(
        (1, 2), EXACT | {"weights_arrive_in_forward": True}, retired=True
    ),
    "predictive, y in fp32": Variant((2, 3), {"publish_dtype": "float32"}, retired=True),
    "Lion, share": Variant((2, 3), zero=SHARE, changes=LION, retired=True),
}


@dataclass(frozen=True)
class Row:
    """One run: a variant at one stage on some ranks."""

    name: str
    stage: int
    ranks: int

    @property
    def variant(self) -> Variant:
        return VARIANTS[self.name]

    def __str__(self) -> str:
        """Also the name of its folder."""
        words = self.name.replace(",", "").replace(" ", "-")
        return f"{words}-stage{self.stage}-ranks{self.ranks}"


ROWS = [
    Row(name, stage, ranks)
    for name, variant in VARIANTS.items()
    for stage in variant.stages
    for ranks in variant.ranks
]
