"""Runs a random program of what a script calls on an engine beside stock DeepSpeed.

The exact rule beside ZeRO-Offload, tiered flattening and the single-parameter gather beside ZeRO:
losses, weights, masters, moments, counters and norms are equal to the bit, and what raises here
raises there. Each program of the exact rule also runs under the predictive rule, with and without a
save and a load in a new engine in its middle, to the same bits. `make fuzz` draws programs
(tests/harness/test_usage.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from tests.fuzz.programs import Program

TIMEOUT_SECONDS = 30.0
NORMS_APART = 2.0**-20
"""ZeRO-Offload adds squares of norms in Python's floats."""


def base_of(program: Program) -> dict[str, Any]:
    import torch

    from tests.support.zenflow import zenflow_config

    settings = program.settings
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[settings.dtype]
    config = zenflow_config(settings.stage, dtype, settings.accumulation, lr=1e-2)
    config["train_micro_batch_size_per_gpu"] = 2
    config["gradient_clipping"] = settings.clipping
    config["fp16"] |= {"initial_scale_power": 8, "hysteresis": 1, "loss_scale_window": 4}
    config["zero_optimization"] |= settings.zero
    if settings.stage == 3:
        config["zero_optimization"] |= {
            "stage3_gather_16bit_weights_on_model_save": True,
            "sub_group_size": 300,
            "stage3_param_persistence_threshold": 20,
        }
    if settings.scheduler:
        config["scheduler"] = {
            "type": "WarmupLR",
            "params": {"warmup_num_steps": 3, "warmup_max_lr": 1e-2},
        }
    return config


def config_of(program: Program, side: str) -> tuple[dict[str, Any], bool]:
    """The config of a side, and whether it is ours."""
    from tests.support.zenflow import offload_config

    config, settings = base_of(program), program.settings
    zero = config["zero_optimization"]
    if side == "offload":
        return offload_config(config), False
    if side in ("exact", "predictive"):
        zero["zenflow"] |= {"update_rule": side, **settings.ours}
        return config, True
    del zero["zenflow"], zero["core_binding"]
    if side.startswith("stock zero"):
        if side.endswith("2"):
            zero |= {"stage": 2}
        return config, False
    zero |= settings.ours if settings.stage < 3 else {"stage3_allgather_single_param": True}
    return config, True


class Norms:
    """The norms that DeepSpeed clips by, by operation; those of `instead` take their place."""

    def __init__(self, instead: Norms | None = None) -> None:
        self.found: dict[int, Any] = {}
        self.number = 0
        self._instead = instead

    def at(self, number: int) -> None:
        self.number = number

    @contextmanager
    def noted(self) -> Iterator[None]:
        from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
        from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

        with ExitStack() as stack:
            for owner in (DeepSpeedZeroOptimizer, DeepSpeedZeroOptimizer_Stage3):
                method = self._around(owner)
                stack.enter_context(patch.object(owner, "unscale_and_clip_grads", method))
            yield

    def _around(self, owner: Any) -> Callable[..., None]:
        import torch

        method = owner.unscale_and_clip_grads

        def unscale_and_clip_grads(zero: Any, gradients: Any, norm: Any) -> None:
            self.found[self.number] = norm
            if self._instead is not None:
                on = getattr(norm, "device", "cpu")
                norm = self._instead.found.get(self.number, norm)
                norm = norm.to(on) if isinstance(norm, torch.Tensor) else norm
            method(zero, gradients, norm)

        return unscale_and_clip_grads


def run_side(program: Program, side: str, norms: Norms) -> list[dict[str, Any]]:
    import deepspeed_ext
    from deepspeed_ext.zenflow.plan import places
    from deepspeed_ext.zenflow.step import link
    from tests.fuzz.program_side import trace
    from tests.support.compare import shared_folder

    config, extended = config_of(program, side)
    deepspeed_ext.enable()  # looks at what is patched below
    deepspeed_ext.disable()
    with (
        shared_folder() as folder,
        patch.object(link, "library_path", lambda *of: None),
        patch.object(places, "CHUNK_NUMEL", 64),
        norms.noted(),
    ):
        return trace(program, config, extended, folder, norms.at)


def check(program: Program) -> list[str]:
    """How ours differs from stock, on this rank; empty: it does not."""
    if program.settings.system == "zero":
        theirs = run_side(program, "stock zero", Norms())
        return differences(theirs, run_side(program, "zero", Norms()), "", 0.0)
    norms, found = Norms(), []
    exact = run_side(program, "exact", norms)
    if oracle := oracle_of(program):
        theirs = run_side(program, oracle, Norms(norms))
        # torch's AdamW adds up in another order on an accelerator
        roughly = rounds(program) or (oracle != "offload" and program.settings.device != "cpu")
        found = differences(theirs, exact, "exact: ", NORMS_APART, roughly=roughly)
    if "error" in exact[-1] and oracle != "offload":
        theirs = run_side(program, "offload", Norms(norms))
        found = differences(theirs, exact, "exact: ", math.inf, only_errors=True)
    predictive = run_side(program, "predictive", Norms())
    found += unlike(exact, predictive, is_tame=not program.has("set_state", "set_master"))
    number = middle(program)
    if number is not None and not any("error" in each for each in predictive):
        operations = program.operations
        saved = (*operations[:number], ("resume",), *operations[number:])
        resumed = run_side(replace(program, operations=saved), "predictive", Norms())
        del resumed[number : number + 1]
        found += differences(predictive, resumed, "resumed: ", 0.0)
    return found


def oracle_of(program: Program) -> str:
    """The stock run to which the exact rule must be equal; empty: none.

    Stages 1 and 2 of DeepSpeed 0.19.8 keep of several backward passes at a boundary the last. Stage
    3 and ZeRO-Offload apply a gradient again where a step has none, and ZeRO-Offload does not
    count gradients that are set into the norm. After two forwards, stage 3 adds up wrongly, too.
    """
    if program.has("set_master") and (
        "module_only" in str(program.operations)
        or (program.settings.stage == 3 and program.has("load", "load_anew", "load_latest"))
    ):
        return ""  # a load of the module takes the weights that a step would have written; stock's
        # stage 3 then takes p, ours goes on with the weights that the run had
    if program.has("crossed"):
        return ""
    several = any(map(has_several, program.operations))
    lacks = any(map(lacks_gradients, program.operations))
    sets = any(name == "grads" and rest[-1] for name, *rest in program.operations)
    if program.settings.stage == 3:
        return ("" if several else "stock zero 2") if lacks else "stock zero" if sets else "offload"
    if several:
        return ""
    return "stock zero" if lacks or sets or program.has("zero_grad") else "offload"


def has_several(operation: Any) -> bool:
    """Whether there may be several backward passes in one micro-step."""
    name, *arguments = operation
    if name == "micro_steps":
        return any(_passes(part) > 1 for part in arguments[0])
    several = ("coalesce", "no_sync", "boundary", "discarded", "backward", "crossed", "retained")
    return name in several


def _passes(part: Any) -> int:
    return sum(operation[0] == "backward" for operation in part)


def lacks_gradients(operation: Any) -> bool:
    """Whether a parameter may have no gradient in a step."""
    if isinstance(operation, tuple) and operation:
        if operation[0] == "backward":
            return bool(operation[4])
        return operation[0] in ("freeze", "skip") or any(map(lacks_gradients, operation))
    return False


def rounds(program: Program) -> bool:
    """Whether gradients are added up in 16 bits on one side and in 32 on the other."""
    if program.settings.dtype == "fp32":
        return False
    several = program.settings.accumulation > 1 or program.has(
        "batch_size", "boundary", "no_sync", "discarded", "coalesce", "crossed", "retained"
    )
    return several or any(
        _passes(part) > 1
        for name, *arguments in program.operations
        if name == "micro_steps"
        for part in arguments[0]
    )


def is_unaligned(program: Program) -> bool:
    """Whether a step need not end where the count of micro-steps says; no checkpoint has it."""
    names = ("coalesce", "boundary", "no_sync", "discarded", "crossed", "retained")
    return program.has("batch_size") or (program.settings.accumulation > 1 and program.has(*names))


def middle(program: Program) -> int | None:
    """Before which operation a run may be resumed: nothing that no checkpoint holds is there."""
    lost = {
        "load_kept",
        "keep",
        "hook",
        "boundary",
        "load_state_dict",
        "gathered",
        "no_sync",
        "teacher",
    }
    # stage 3 of DeepSpeed loads other masters without the optimizer once it has loaded
    if "load_latest" in str(program) or "no_optimizer" in str(program) or is_unaligned(program):
        return None
    for number in range(len(program.operations) // 2, 0, -1):
        before = str(program.operations[:number])
        has_lost = any(f"'{name}'" in before for name in lost)
        if not has_lost and program.operations[number - 1][0] in ("micro_steps", "grads"):
            return number
    return None


def differences(
    theirs: list[dict[str, Any]],
    ours: list[dict[str, Any]],
    where: str,
    norms_apart: float,
    roughly: bool = False,
    only_errors: bool = False,
) -> list[str]:
    from tests.support.same import first_difference

    for number, (expected, actual) in enumerate(zip(theirs, ours, strict=False)):
        name = f"{where}operation {number} ({expected['what']})"
        errors = [each.get("error", "") for each in (expected, actual)]
        if any(errors):
            if all(errors):
                return []
            if errors[0].startswith(CRASHES) or "exceeds dimension size" in errors[0]:
                return []
            return [f"{name}: stock says {errors[0][:600]!r}, ours {errors[1][:600]!r}"]
        norms = [each.get("norm") for each in (expected, actual)]
        if only_errors:
            continue
        if roughly:
            if text := _far(expected, actual):
                return [f"{name}: {text}"]
            continue
        dropped = ("norm", "micro_steps") if where.startswith("resumed") else ("norm",)
        expected, actual = (
            {key: each[key] for key in each if key not in dropped} for each in (expected, actual)
        )
        if difference := first_difference(expected, actual, name):
            return [difference]
        if not where.startswith("resumed") and _apart(norms) > norms_apart:
            return [f"{name}: norm {norms[1]}, expected {norms[0]}"]
    if len(theirs) != len(ours):
        return [f"{where}{len(ours)} operations, expected {len(theirs)}"]
    return []


LOSSES_APART = 0.1
"""Of a training of a few large steps."""
CRASHES = (
    *("TypeError", "KeyError", "AttributeError", "IndexError"),
    "AssertionError: Offloading is supported only for DeepSpeed FusedAdam",
)
"""Beginnings of errors where ours may work."""
EXACT = ("global_steps", "micro_steps", "samples", "skipped", "lr", "groups", "scale", "boundary")


def _far(expected: dict[str, Any], actual: dict[str, Any]) -> str:
    """What differs by more than 16 bits explain."""
    for key in EXACT:
        if expected.get(key) != actual.get(key):
            return f"{key} is {actual.get(key)}, expected {expected.get(key)}"
    norms = [each.get("norm") for each in (expected, actual)]
    if _apart(norms) > 0.1 and max(filter(None, norms), default=0) > 0.01:
        return f"norm is about {norms[1]}, expected {norms[0]}"
    values = [each.get("value") for each in (expected, actual)]
    if expected["what"] == "micro_steps":
        for one, other in zip(*values, strict=True):
            if isinstance(one, float) and _apart([one, other]) > 0.05:
                return f"loss is about {other}, expected {one}"
    return ""


def _apart(norms: list[float | None]) -> float:
    one, other = norms
    if one is None or other is None:
        return 0.0 if one is other else math.inf
    if one == other or (not math.isfinite(one) and not math.isfinite(other)):
        return 0.0
    return abs(one - other) / max(abs(one), abs(other))


def unlike(
    exact: list[dict[str, Any]], predictive: list[dict[str, Any]], is_tame: bool
) -> list[str]:
    """What the predictive rule does that the exact one does not: errors, other counters, NaN."""
    for number, (one, other) in enumerate(zip(exact, predictive, strict=False)):
        errors = [each.get("error", "") for each in (one, other)]
        if any(errors):
            if all(errors):
                return []
            return [f"predictive: operation {number} ({one['what']}): {errors}"]
        for key in ("global_steps", "micro_steps", "skipped", "lr", "scale") if is_tame else ():
            if one.get(key) != other.get(key):
                return [f"predictive: operation {number}: {key} {one.get(key)}, {other.get(key)}"]
    means = [_mean_loss(each) for each in (exact, predictive)]
    if is_tame and _apart(means) > LOSSES_APART:
        return [
            f"predictive: the losses are {means[1]:.3f} on average, the exact rule's {means[0]:.3f}"
        ]
    return []


def _mean_loss(seen: list[dict[str, Any]]) -> float:
    """Of the training, without what is not finite."""
    values = [each.get("value") for each in seen if each["what"] == "micro_steps"]
    losses = [loss for value in values for loss in value or () if isinstance(loss, float)]
    finite = [loss for loss in losses if math.isfinite(loss)]
    return sum(finite) / max(1, len(finite))


def found_by(program: Program) -> list[str]:
    """What any rank finds, or how the ranks ended."""
    from tests.support.ranks import RankError, run_ranks

    settings = program.settings
    try:
        found = run_ranks(
            settings.ranks, check, program, device=settings.device, timeout_seconds=TIMEOUT_SECONDS
        )
    except RankError as error:
        races = " races, " in str(error)
        if races and ("USAGE ours False" in str(error) or "set_fp32_grad_for_param" in str(error)):
            return []  # DeepSpeed's own: of what it leaves when it raises, and of a gradient set
        lines = [line for line in str(error).splitlines() if "USAGE" in line or "Error" in line]
        return ["ranks ended: " + " | ".join(lines)[:3000]]
    return [text for texts in found for text in texts]
