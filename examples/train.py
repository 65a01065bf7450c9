"""Trains a byte-level language model on the source code of Python's standard library.

    deepspeed --num_accelerators 2 examples/train.py
    deepspeed --num_accelerators 2 examples/train.py --resume
    deepspeed --num_accelerators 2 examples/train.py --mode zero2

The run is stored in ``outputs/<mode>``: the checkpoint, ``metrics.jsonl`` (one line per optimizer step) and
``run.json``. A run that is resumed with the same settings gives bitwise the losses of an uninterrupted run.
"""

import argparse
import json
import math
import os
import resource
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

import deepspeed
import deepspeed.comm as dist
import torch
from data import ByteText, standard_library_text
from deepspeed.accelerator import get_accelerator
from model import LanguageModel, ModelConfig, parameter_groups
from torch.optim.lr_scheduler import LambdaLR
from tqdm import tqdm

import deepspeed_ext
from deepspeed_ext.config import ZeroFields
from deepspeed_ext.runtime import shared_buffers

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

# DeepSpeed calls a torch function by a name that torch 2.13 deprecates.
warnings.filterwarnings("ignore", message=".*all_gather_into_tensor.*", category=FutureWarning)

WARMUP_STEPS = 20
EVAL_BATCHES = 16
PROMPT = b"def "


def parse_args(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    run = parser.add_argument_group("run")
    run.add_argument("--mode", choices=MODES, default="zenflow", help="which file of configs/ to train with")
    run.add_argument("--config", type=Path, help="another DeepSpeed config instead of the mode's")
    run.add_argument("--output", type=Path, help="folder of the run (default: outputs/MODE)")
    run.add_argument("--resume", action="store_true", help="continue from the checkpoint in the output folder")
    run.add_argument("--steps", type=int, default=500, help="optimizer steps of the whole run")
    run.add_argument("--save-every", type=int, default=100, help="optimizer steps between two checkpoints")
    run.add_argument("--stop-after", type=int, help="save and stop after this step, as if interrupted")
    run.add_argument("--seed", type=int, default=0)
    run.add_argument("--upstream", action="store_true", help="train with stock DeepSpeed, for comparison")
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
    args.output = args.output or ROOT / "outputs" / (f"{args.mode}-upstream" if args.upstream else args.mode)
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
        config["zero_optimization"] = {name: v for name, v in zero.items() if name not in ZeroFields.model_fields}
    return config


def share_cores() -> None:
    """Divide the cores among the ranks on a machine without an accelerator; otherwise each rank would use all of
    them."""
    if get_accelerator().device_name() == "cpu" and "OMP_NUM_THREADS" not in os.environ:
        cores = len(os.sched_getaffinity(0))
        ranks = os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE") or "1"
        torch.set_num_threads(max(1, cores // int(ranks)))


def warmup_cosine(total_steps: int) -> Callable[[int], float]:
    """Factor of the learning rate: linear warm-up, then half a cosine period down to a tenth."""

    def factor(step: int) -> float:
        warmup = min(1.0, (step + 1) / WARMUP_STEPS)
        progress = min(1.0, step / total_steps)
        return warmup * (0.55 + 0.45 * math.cos(math.pi * progress))

    return factor


def build_engine(args: argparse.Namespace, config: dict[str, Any]) -> deepspeed.DeepSpeedEngine:
    torch.manual_seed(args.seed)
    shape = ModelConfig(dim=args.dim, num_layers=args.layers, num_heads=args.heads, max_seq_len=args.seq_len)
    model = LanguageModel(shape)
    initialize = deepspeed.initialize if args.upstream else deepspeed_ext.initialize
    engine, *_ = initialize(
        model=model,
        model_parameters=parameter_groups(model, config["optimizer"]["params"].get("weight_decay", 0.0)),
        lr_scheduler=lambda optimizer: LambdaLR(optimizer, warmup_cosine(args.steps)),
        config=config,
    )
    return engine


def mean_over_ranks(value: torch.Tensor) -> float:
    total = value.detach().float()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def train_step(engine: deepspeed.DeepSpeedEngine, text: ByteText, step: int, args: argparse.Namespace) -> float:
    """One optimizer step; returns the mean loss of its micro-batches over all ranks, in nats per byte."""
    micro_steps, batch_size = engine.gradient_accumulation_steps(), engine.train_micro_batch_size_per_gpu()
    losses = []
    for micro_step in range(step * micro_steps, (step + 1) * micro_steps):
        batch = text.batch(micro_step, dist.get_rank(), batch_size, args.seq_len, args.seed)
        loss = engine(*(tensor.to(engine.device) for tensor in batch))
        engine.backward(loss)
        engine.step()
        losses.append(loss.detach())
    return mean_over_ranks(torch.stack(losses).mean())


def save(engine: deepspeed.DeepSpeedEngine, step: int, args: argparse.Namespace) -> None:
    engine.save_checkpoint(str(args.output), tag=f"step{step}", client_state={"step": step})


def open_metrics(first: int, args: argparse.Namespace) -> TextIO:
    """Open the metrics file, truncated to the steps before `first`; on ranks other than 0, open a file that discards
    everything."""
    if dist.get_rank() != 0:
        return open(os.devnull, "w")
    path = args.output / "metrics.jsonl"
    before = path.read_text().splitlines(keepends=True)[:first] if first else []
    path.write_text("".join(before))
    return path.open("a")


def overlap_figures(engine: deepspeed.DeepSpeedEngine) -> dict[str, float]:
    """Metrics of the last step's overlap; empty if the optimizer does not run in a separate process."""
    measured = engine.optimizer.measurements() if hasattr(engine.optimizer, "measurements") else {}
    metrics = {name: measured.get(f"zenflow_{name}", math.nan) for name in ("wait_ms", "worker_ms", "prediction_error")}
    return {name: float(f"{value:.4g}") for name, value in metrics.items() if math.isfinite(value)}


def train(
    engine: deepspeed.DeepSpeedEngine, text: ByteText, first: int, last: int, args: argparse.Namespace
) -> list[dict[str, float]]:
    """Run optimizer steps `first` to `last` - 1; write one line of metrics per step and save every `save_every` steps.

    Returns:
        The metrics of each step.
    """
    lines = []
    tokens_per_step = engine.train_batch_size() * args.seq_len
    bar = tqdm(range(first, last), total=args.steps, initial=first, unit="step", disable=dist.get_rank() != 0)
    with open_metrics(first, args) as metrics:
        for step in bar:
            start = time.perf_counter()
            loss = train_step(engine, text, step, args)
            seconds = time.perf_counter() - start
            overlap = overlap_figures(engine)
            waited = f", waited {overlap['wait_ms']:.1f} ms" if overlap else ""
            bar.set_postfix_str(f"loss {loss:.3f}, {tokens_per_step / seconds:,.0f} tokens/s{waited}")
            lines.append({"step": step, "loss": loss, "seconds": round(seconds, 4), **overlap})
            metrics.write(json.dumps(lines[-1]) + "\n")
            if (step + 1) % args.save_every == 0 or step + 1 == last:
                metrics.flush()
                save(engine, step + 1, args)
    return lines


@torch.no_grad()
def held_out_loss(engine: deepspeed.DeepSpeedEngine, text: ByteText, args: argparse.Namespace) -> float:
    """Mean loss on held-out text, in nats per byte."""
    engine.eval()
    losses = []
    for index in range(EVAL_BATCHES):
        batch = text.held_out_batch(index, dist.get_rank(), engine.train_micro_batch_size_per_gpu(), args.seq_len)
        losses.append(engine(*(tensor.to(engine.device) for tensor in batch)))
    engine.train()
    return mean_over_ranks(torch.stack(losses).mean())


@torch.no_grad()
def generate(engine: deepspeed.DeepSpeedEngine, args: argparse.Namespace, temperature: float = 0.7) -> str:
    """Continue `PROMPT`. All ranks take part, because ZeRO-3 gathers parameters in each forward pass."""
    engine.eval()
    generator = torch.Generator().manual_seed(args.seed)
    tokens = list(PROMPT)
    for _ in range(args.sample_bytes):
        context = torch.tensor([tokens[-args.seq_len :]], device=engine.device)
        probabilities = (engine(context)[0, -1].float().cpu() / temperature).softmax(dim=-1)
        tokens.append(int(torch.multinomial(probabilities, 1, generator=generator)))
    engine.train()
    return bytes(tokens).decode(errors="replace")


def resume(engine: deepspeed.DeepSpeedEngine, settings: dict[str, Any], args: argparse.Namespace) -> int:
    """Load the last checkpoint and return the next step. Exits if there is none or if the run had other settings."""
    run_file = args.output / "run.json"
    if not run_file.is_file():
        raise SystemExit(f"--resume: no run in {args.output}; train without --resume first")
    before = json.loads(run_file.read_text())
    changed = [f"{name}: was {before.get(name)}, is {now}" for name, now in settings.items() if before.get(name) != now]
    if changed:
        raise SystemExit(f"--resume: the run in {args.output} had other settings ({'; '.join(changed)})")
    path, client_state = engine.load_checkpoint(str(args.output))
    if path is None:
        raise SystemExit(f"--resume: no checkpoint in {args.output}; train without --resume first")
    return client_state["step"]


def report_overlap(lines: list[dict[str, float]]) -> None:
    """Print how much of the optimizer's time overlapped with the model, and the error of the prediction."""
    overlapped = [line for line in lines if line.get("worker_ms")]
    if not overlapped:
        return
    worker, wait = (statistics.fmean(line[name] for line in overlapped) for name in ("worker_ms", "wait_ms"))
    step = 1e3 * statistics.fmean(line["seconds"] for line in overlapped)
    print(
        f"overlap: the optimizer process worked {worker:.1f} ms per step, and the model waited {wait:.1f} ms for it, "
        f"{wait / step:.1%} of the step"
    )
    if errors := [line["prediction_error"] for line in overlapped if "prediction_error" in line]:
        print(f"prediction error: {statistics.median(errors):.3f} of an update (median)")


def report(engine: deepspeed.DeepSpeedEngine, lines: list[dict[str, float]]) -> None:
    """Print memory and the optimizer's metrics; the log already shows the start-up."""
    report_overlap(lines)
    print(f"peak host memory of rank 0: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10:,.0f} MiB")
    if get_accelerator().device_name() != "cpu":
        print(f"peak accelerator memory of rank 0: {get_accelerator().max_memory_allocated() / 2**20:,.0f} MiB")
    if hasattr(engine.optimizer, "measurements"):
        print("metrics, as docs/zenflow.md and docs/flattening.md explain them:")
        print(*(f"  {name}: {value:.4g}" for name, value in engine.optimizer.measurements().items()), sep="\n")


def run(args: argparse.Namespace) -> float:
    """Train, save, evaluate and sample. Needs the process group. Returns the held-out loss in nats per byte."""
    is_first_rank = dist.get_rank() == 0
    say = print if is_first_rank else lambda *_: None
    text = standard_library_text()
    engine = build_engine(args, load_config(args))
    settings = {**asdict(engine.module.config), "seed": args.seed}
    say(f"{sum(p.numel() for p in engine.module.parameters()):,} parameters, {len(text.train):,} bytes of text")

    first = resume(engine, settings, args) if args.resume else 0
    if is_first_rank:
        args.output.mkdir(parents=True, exist_ok=True)
        (args.output / "run.json").write_text(json.dumps(settings, indent=2))
    last = min(args.steps, args.stop_after or args.steps)
    if first >= last:
        say(f"already trained {first} steps; use --steps {first + 100} to continue")
    lines = train(engine, text, first, last, args)

    loss = held_out_loss(engine, text, args)
    say(f"held-out loss: {loss:.3f} nats/byte; checkpoint: {args.output / f'step{max(first, last)}'}")
    if is_first_rank:
        report(engine, lines)
    if args.sample_bytes:
        say(f"a sample:\n{generate(engine, args)}")
    engine.destroy()
    return loss


def main() -> None:
    args = parse_args()
    share_cores()
    with shared_buffers.not_made():
        deepspeed.init_distributed()
    run(args)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
