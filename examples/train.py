"""Trains a byte-level language model on the source code of Python's standard library.

    deepspeed --num_accelerators 2 examples/train.py
    deepspeed --num_accelerators 2 examples/train.py --resume
    deepspeed --num_accelerators 2 examples/train.py --mode zero2

The run is stored in ``outputs/<mode>``: the checkpoint, ``metrics.jsonl`` (one line per optimizer
step) and ``run.json``. A run that is resumed with the same settings gives bitwise the losses of an
uninterrupted run. Ctrl-C and SIGTERM save it and end; what it prints then continues it.
"""

import argparse
import json
import math
import os
import resource
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext, redirect_stderr, redirect_stdout, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

import deepspeed
import deepspeed.comm as dist
import torch
from data import ByteText, standard_library_text
from deepspeed.accelerator import get_accelerator
from folder import RunFolder, command, shown
from interrupts import Interrupts, end_at_once
from model import LanguageModel, ModelConfig, parameter_groups
from torch.optim.lr_scheduler import LambdaLR
from tqdm import tqdm

import deepspeed_ext
from deepspeed_ext.config import ZeroFields
from deepspeed_ext.errors import DeepSpeedExtError

ROOT = Path(__file__).resolve().parent.parent
MODES = {
    "zenflow": "zenflow.json",
    "zenflow_stage3": "zenflow_stage3.json",
    "zenflow_selective": "zenflow_selective.json",
    "zero1": "zero1.json",
    "zero2": "zero2.json",
    "offload": "zero2_offload.json",
    "zero3": "zero3.json",
    "zero3_single_gather": "zero3_single_gather.json",
}
"""Values of ``--mode`` and their files in ``configs/``."""

# DeepSpeed calls torch functions by names that torch 2.13 deprecates.
warnings.filterwarnings(
    "ignore", message=r".*torch\.distributed\..* is deprecated", category=FutureWarning
)

WARMUP_STEPS = 20
EVAL_BATCHES = 16
PROMPT = b"def "
LINE_EVERY_SECONDS = 5.0
"""Between two lines about the training where there is no terminal that shows a bar."""


def parse_args(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    run = parser.add_argument_group("run")
    run.add_argument(
        "--mode", choices=MODES, default="zenflow", help="which file of configs/ to train with"
    )
    run.add_argument("--config", type=Path, help="another DeepSpeed config instead of the mode's")
    run.add_argument("--output", type=Path, help="folder of the run (default: outputs/MODE)")
    run.add_argument(
        "--resume", action="store_true", help="continue from the checkpoint in the output folder"
    )
    run.add_argument("--steps", type=int, default=500, help="optimizer steps of the whole run")
    run.add_argument(
        "--save-every", type=int, default=100, help="optimizer steps between two checkpoints"
    )
    run.add_argument(
        "--stop-after", type=int, help="save and stop after this step, as if interrupted"
    )
    run.add_argument("--seed", type=int, default=0)
    run.add_argument(
        "--upstream", action="store_true", help="train with stock DeepSpeed, for comparison"
    )
    run.add_argument("--sample-bytes", type=int, default=240, help="length of the generated text")
    overrides = parser.add_argument_group("overrides of the config")
    overrides.add_argument("--batch-size", type=int, help="sequences per rank and micro-step")
    overrides.add_argument("--grad-accum", type=int, help="micro-steps per optimizer step")
    overrides.add_argument("--lr", type=float, help="peak learning rate")
    overrides.add_argument("--stage", type=int, choices=(0, 1, 2, 3), help="ZeRO stage")
    model = parser.add_argument_group("model")
    model.add_argument("--dim", type=int, default=ModelConfig.dim)
    model.add_argument("--layers", type=int, default=ModelConfig.num_layers)
    model.add_argument("--heads", type=int, default=ModelConfig.num_heads)
    model.add_argument("--seq-len", type=int, default=ModelConfig.max_seq_len)
    parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)  # given by the launcher
    args = parser.parse_args(arguments)
    if args.dim % (2 * args.heads):
        parser.error(f"--dim {args.dim} must be divisible by twice --heads {args.heads}")
    if args.config is not None and not args.config.is_file():
        parser.error(f"--config {args.config}: no such file")
    args.output = args.output or ROOT / "outputs" / (
        f"{args.mode}-upstream" if args.upstream else args.mode
    )
    return args


def load_config(args: argparse.Namespace) -> dict[str, Any]:
    """The mode's DeepSpeed config, with overrides from the command line."""
    config = json.loads((args.config or ROOT / "configs" / MODES[args.mode]).read_text())
    if args.batch_size is not None:
        config["train_micro_batch_size_per_gpu"] = args.batch_size
    if args.grad_accum is not None:
        config["gradient_accumulation_steps"] = args.grad_accum
    if args.lr is not None:
        config["optimizer"]["params"]["lr"] = args.lr
    zero = config["zero_optimization"]
    if args.stage is not None:
        zero["stage"] = args.stage
    if args.upstream:
        config["zero_optimization"] = {
            name: v for name, v in zero.items() if name not in ZeroFields.model_fields
        }
    return config


def share_cores() -> None:
    """Divide the cores among the ranks on a machine without an accelerator; otherwise each rank
    would use all of them."""
    if get_accelerator().device_name() == "cpu" and "OMP_NUM_THREADS" not in os.environ:
        cores = len(os.sched_getaffinity(0))
        ranks = os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE") or "1"
        torch.set_num_threads(max(1, cores // int(ranks)))


def connect() -> None:
    """Start the communication of the ranks. A process that no launcher has started is rank 0 of 1,
    because the extension is on, which `build_engine` undoes for `--upstream`."""
    deepspeed_ext.enable()
    deepspeed.init_distributed()


def warmup_cosine(total_steps: int) -> Callable[[int], float]:
    """Factor of the learning rate: linear warm-up, then half a cosine period down to a tenth."""

    def factor(step: int) -> float:
        warmup = min(1.0, (step + 1) / WARMUP_STEPS)
        progress = min(1.0, step / total_steps)
        return warmup * (0.55 + 0.45 * math.cos(math.pi * progress))

    return factor


def build_engine(
    args: argparse.Namespace, shape: ModelConfig, config: dict[str, Any]
) -> deepspeed.DeepSpeedEngine:
    torch.manual_seed(args.seed)
    model = LanguageModel(shape)
    if args.upstream:
        deepspeed_ext.disable()
    initialize = deepspeed.initialize if args.upstream else deepspeed_ext.initialize
    engine, *_ = initialize(
        model=model,
        model_parameters=parameter_groups(
            model, config["optimizer"]["params"].get("weight_decay", 0.0)
        ),
        lr_scheduler=lambda optimizer: LambdaLR(optimizer, warmup_cosine(args.steps)),
        config=config,
    )
    return engine


def mean_over_ranks(*values: torch.Tensor | float) -> list[float]:
    total = torch.tensor(
        [float(value) for value in values], device=get_accelerator().current_device_name()
    )
    dist.all_reduce(total)
    return (total / dist.get_world_size()).tolist()


def train_step(
    engine: deepspeed.DeepSpeedEngine, text: ByteText, step: int, args: argparse.Namespace
) -> torch.Tensor:
    """One optimizer step; returns the mean loss of its micro-batches on this rank, in nats per
    byte."""
    micro_steps = engine.gradient_accumulation_steps()
    batch_size = engine.train_micro_batch_size_per_gpu()
    losses = []
    for micro_step in range(step * micro_steps, (step + 1) * micro_steps):
        batch = text.batch(micro_step, dist.get_rank(), batch_size, args.seq_len, args.seed)
        loss = engine(*(tensor.to(engine.device) for tensor in batch))
        engine.backward(loss)
        engine.step()
        losses.append(loss.detach())
    return torch.stack(losses).mean()


def save(engine: deepspeed.DeepSpeedEngine, step: int, args: argparse.Namespace) -> None:
    engine.save_checkpoint(str(args.output), tag=f"step{step}", client_state={"step": step})


def say(text: str) -> None:
    """Print on rank 0. If nobody reads it any more, as after Ctrl-C to ``make train | tee log``,
    training goes on."""
    if dist.get_rank() == 0:
        with suppress(OSError):
            print(text, flush=True)


def overlap_figures(engine: deepspeed.DeepSpeedEngine) -> dict[str, float]:
    """What is measured of the last step's overlap; empty if the optimizer does not run in a
    separate process."""
    measured = engine.optimizer.measurements() if hasattr(engine.optimizer, "measurements") else {}
    names = ("wait_ms", "worker_ms", "overlap", "prediction_error", "rounding_error")
    return {
        name: float(f"{measured[key]:.4g}")
        for name in names
        if (key := f"zenflow_{name}") in measured
    }


class Progress:
    """Shows the training: on a terminal a bar, otherwise a line every few seconds; on ranks other
    than 0 nothing."""

    def __init__(self, first: int, args: argparse.Namespace, tokens_per_step: int) -> None:
        self._steps, self._tokens = args.steps, tokens_per_step
        self._has_bar = sys.stderr.isatty()
        no_bar = not self._has_bar or dist.get_rank() != 0
        self._bar = tqdm(total=args.steps, initial=first, unit="step", disable=no_bar)
        self._due = 0.0

    def show(self, line: dict[str, float]) -> None:
        """Show the metrics of a step."""
        waited = f", waited {line['wait_ms']:.1f} ms" if "wait_ms" in line else ""
        text = f"loss {line['loss']:.3f}, {self._tokens / line['seconds']:,.0f} tokens/s{waited}"
        self._bar.set_postfix_str(text, refresh=False)
        self._bar.update()
        done, now = int(line["step"]) + 1, time.monotonic()
        if not self._has_bar and (now >= self._due or done == self._steps):
            self._due = now + LINE_EVERY_SECONDS
            say(f"step {done}/{self._steps}: {text}")

    def close(self) -> None:
        self._bar.close()


def train(
    engine: deepspeed.DeepSpeedEngine,
    text: ByteText,
    first: int,
    last: int,
    args: argparse.Namespace,
    metrics: TextIO,
) -> tuple[list[dict[str, float]], str | None]:
    """Run optimizer steps `first` to `last` - 1; write one line of metrics per step and save every
    `save_every` steps. If any rank gets a signal, all of them save after the same step and stop.

    Returns:
        The metrics of each step, and in words what has stopped the training early; None: nothing
            has.
    """
    lines: list[dict[str, float]] = []
    interrupted = 0.0  # ranks with a signal, as a fraction
    progress = Progress(first, args, engine.train_batch_size() * args.seq_len)
    with Interrupts() as interrupts, metrics:
        for step in range(first, last):
            start = time.perf_counter()
            loss = train_step(engine, text, step, args)
            mean_loss, interrupted = mean_over_ranks(loss, interrupts.received is not None)
            seconds = time.perf_counter() - start
            lines.append(
                {
                    "step": step,
                    "loss": mean_loss,
                    "seconds": round(seconds, 4),
                    **overlap_figures(engine),
                }
            )
            metrics.write(json.dumps(lines[-1]) + "\n")
            progress.show(lines[-1])
            if interrupted or (step + 1) % args.save_every == 0 or step + 1 == last:
                metrics.flush()
                save(engine, step + 1, args)
            if interrupted:
                break
        progress.close()
    return lines, (interrupts.received or "a signal on another rank") if interrupted else None


@torch.no_grad()
def held_out_loss(
    engine: deepspeed.DeepSpeedEngine, text: ByteText, args: argparse.Namespace
) -> float:
    """Mean loss on held-out text, in nats per byte."""
    engine.eval()
    losses = []
    for index in range(EVAL_BATCHES):
        batch = text.held_out_batch(
            index, dist.get_rank(), engine.train_micro_batch_size_per_gpu(), args.seq_len
        )
        losses.append(engine(*(tensor.to(engine.device) for tensor in batch)))
    engine.train()
    return mean_over_ranks(torch.stack(losses).mean())[0]


@torch.no_grad()
def generate(
    engine: deepspeed.DeepSpeedEngine, args: argparse.Namespace, temperature: float = 0.7
) -> str:
    """Continue `PROMPT`. All ranks take part, because ZeRO-3 gathers parameters in each forward
    pass."""
    engine.eval()
    generator = torch.Generator().manual_seed(args.seed)
    tokens = list(PROMPT)
    for _ in range(args.sample_bytes):
        context = torch.tensor([tokens[-args.seq_len :]], device=engine.device)
        probabilities = (engine(context)[0, -1].float().cpu() / temperature).softmax(dim=-1)
        tokens.append(int(torch.multinomial(probabilities, 1, generator=generator)))
    engine.train()
    return bytes(tokens).decode(errors="replace")


def resume(engine: deepspeed.DeepSpeedEngine, args: argparse.Namespace) -> int:
    """Load the last checkpoint and return the next step."""
    path, client_state = engine.load_checkpoint(str(args.output))
    if path is None:
        raise SystemExit(
            f"--resume: no checkpoint in {shown(args.output)}; train without --resume first"
        )
    return client_state["step"]


def report_overlap(lines: list[dict[str, float]]) -> None:
    """Print how much of the optimizer's time overlapped with the model, and what the prediction's
    error means."""
    if not any("worker_ms" in line for line in lines):
        return
    overlapped = [line for line in lines if "overlap" in line]
    if not overlapped:
        say(
            "no step overlapped with its update: "
            "the first steps never do, and the log says how many these are"
        )
        return
    names = ("worker_ms", "wait_ms", "seconds")
    worker, wait, seconds = (statistics.fmean(line[name] for line in overlapped) for name in names)
    say(
        f"{len(overlapped)} steps overlapped with updates: the optimizer process worked "
        f"{worker:.1f} ms per step, and "
        f"the model waited {wait:.1f} ms for it, {wait / seconds / 1e3:.1%} of the step"
    )
    if probed := [line for line in overlapped if "prediction_error" in line]:
        error = statistics.median(line["prediction_error"] for line in probed)
        rounding = statistics.median(line["rounding_error"] for line in probed)
        say(verdict(error, rounding))


def verdict(error: float, rounding: float) -> str:
    """Say how far predicted weights are from the exact ones, in updates, and what to do about it.
    Near the error of rounding weights to their dtype, or near a third of an update, nothing;
    ZenFlow's guard acts at three times the larger."""
    excess = error / max(rounding, 1 / 3)
    exact = '"update_rule": "exact" in the zenflow section'
    if excess <= 1.5:
        advice = "That is normal: nothing to do"
    elif excess <= 3:
        advice = f"That is high: if the loss suffers, set {exact}"
    else:
        advice = (
            "That is too much: ZenFlow's guard lets steps wait for their updates until it falls. "
            f"If it stays, lower the learning rate or set {exact}"
        )
    return (
        f"predicted weights are {error:.2f} updates from the exact ones; rounding them to their "
        f"dtype alone makes {rounding:.2f}. {advice}"
    )


def report(engine: deepspeed.DeepSpeedEngine, lines: list[dict[str, float]]) -> None:
    """Print memory and overlap; `engine.optimizer.measurements()` has more."""
    report_overlap(lines)
    say(
        f"peak host memory of rank 0: "
        f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10:,.0f} MiB"
    )
    if get_accelerator().device_name() != "cpu":
        say(
            f"peak accelerator memory of rank 0: "
            f"{get_accelerator().max_memory_allocated() / 2**20:,.0f} MiB"
        )


def run(args: argparse.Namespace) -> float | None:
    """Train, save, evaluate and sample. Needs the process group. Returns the held-out loss in nats
    per byte; None if the training was interrupted."""
    shape = ModelConfig(
        dim=args.dim, num_layers=args.layers, num_heads=args.heads, max_seq_len=args.seq_len
    )
    folder = RunFolder(args.output, {**asdict(shape), "seed": args.seed})
    folder.require_same() if args.resume else folder.require_unused(args.steps)
    text = standard_library_text()
    engine = build_engine(args, shape, load_config(args))
    # ZeRO-3 leaves 0 elements here
    numel = sum(getattr(p, "ds_numel", p.numel()) for p in engine.module.parameters())
    say(
        f"{numel:,} parameters, {len(text.train):,} bytes of text; "
        f"the run is stored in {shown(args.output)}"
    )

    first = resume(engine, args) if args.resume else 0
    if args.resume:
        say(f"resuming {shown(args.output)} from checkpoint step{first}, after {first} steps")
    last = min(args.steps, args.stop_after or args.steps)
    if first >= last:
        say(
            f"already trained {first} steps. Continue with:\n    "
            f"{command('--resume', steps=first + 100)}"
        )
    metrics = folder.open_metrics(first) if dist.get_rank() == 0 else open(os.devnull, "w")  # noqa: SIM115 (train closes it)
    lines, stopped_by = train(engine, text, first, last, args, metrics)
    loss = None
    if stopped_by is not None:
        done = first + len(lines)
        say(
            f"interrupted by {stopped_by}, saved after step {done}. "
            f"Continue with:\n    {command('--resume')}"
        )
    else:
        loss = held_out_loss(engine, text, args)
        say(
            f"held-out loss: {loss:.3f} nats/byte; checkpoint: "
            f"{shown(args.output / f'step{max(first, last)}')}"
        )
        report(engine, lines)
        if args.sample_bytes:
            say(f"a sample:\n{generate(engine, args)}")
    engine.destroy()
    return loss


def is_first() -> bool:
    """Whether this process says what all would say."""
    return os.environ.get("RANK", "0") == "0"


def main() -> None:
    end_at_once()  # on Ctrl-C, until the training begins
    with (
        nullcontext() if is_first() else redirect_stderr(None),
        nullcontext() if is_first() else redirect_stdout(None),
    ):
        args = parse_args()  # one rank says what is wrong
    share_cores()
    try:
        connect()
        run(args)
    except (DeepSpeedExtError, SystemExit) as error:  # all ranks have it: one prints it
        raise SystemExit(f"error: {error}" if is_first() else 1) from None
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
