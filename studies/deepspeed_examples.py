"""DeepSpeed's own ZenFlow and SuperOffload examples, unchanged, on two CPU ranks with a tiny model.

    git clone https://github.com/deepspeedai/DeepSpeedExamples
    python -m studies.deepspeed_examples --checkout DeepSpeedExamples --steps 24

Each row runs the example's script from the checkout in a folder that holds what the script asks
for by name: a Llama of random weights with a tokenizer of bytes, and "tatsu-lab/alpaca" with
invented sums. Nothing of the checkout is changed or copied. Rows differ in the DeepSpeed config and
in DSEXT_AUTOLOAD only. Losses go to benchmarks/deepspeed_examples.json, and the curves to
docs/zenflow_examples.svg. The SuperOffload example imports wandb, which it does not use here; both
need `datasets`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

from tests.perf import report
from tools import stored

ROOT = Path(__file__).resolve().parent.parent
RESULT = ROOT / "benchmarks" / "deepspeed_examples.json"
PICTURE = ROOT / "docs" / "zenflow_examples.svg"
ZENFLOW = "training/DeepSpeed-ZenFlow/finetuning/finetune_llama.py"
SUPEROFFLOAD = "training/DeepSpeed-SuperOffload/finetune_zero3.py"
RANKS, BATCH, SECONDS = 2, 8, 900.0
RATE = 1e-3
"""The example's 2e-5 is for a model of seven billion parameters; a tiny one learns with more."""
OFFLOAD = {"offload_optimizer": {"device": "cpu", "pin_memory": False}}
THEIRS = {"topk_ratio": 0.1, "update_interval": 4, "full_warm_up_rounds": 0, "overlap_step": True}
"""The section of the example's zf_config.json."""
OURS = {"update_rule": "predictive"}
SUPER = {"ratio": 0.9, "super_offload": True, "cpuadam_cores_perc": 0.9}


@dataclass(frozen=True)
class Case:
    """One run.

    Attributes:
        script: of the checkout.
        zero: its ``zero_optimization``.
        extended: whether DSEXT_AUTOLOAD is 1.
    """

    name: str
    script: str
    zero: dict[str, Any]
    extended: bool


CASES = (
    Case("ZeRO-Offload", ZENFLOW, {"stage": 2, **OFFLOAD}, False),
    Case("DeepSpeed's ZenFlow", ZENFLOW, {"stage": 2, **OFFLOAD, "zenflow": THEIRS}, False),
    Case("ours, its config", ZENFLOW, {"stage": 2, **OFFLOAD, "zenflow": THEIRS}, True),
    Case("ours, predictive", ZENFLOW, {"stage": 2, **OFFLOAD, "zenflow": OURS}, True),
    Case("stage 3: ZeRO-Offload", SUPEROFFLOAD, {"stage": 3, **OFFLOAD}, False),
    Case(
        "stage 3: SuperOffload",
        SUPEROFFLOAD,
        {"stage": 3, "offload_optimizer": {**OFFLOAD["offload_optimizer"], **SUPER}},
        False,
    ),
    Case("stage 3: ours", SUPEROFFLOAD, {"stage": 3, **OFFLOAD, "zenflow": OURS}, True),
)


def prepare(folder: Path, steps: int) -> None:
    """Write the model, its tokenizer and the data of a run."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed

    letters = {letter: number for number, letter in enumerate(sorted(ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=letters | {"</s>": 256}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>")
    fast.model_max_length = 128
    fast.save_pretrained(folder / "model")
    set_seed(0)
    config = LlamaConfig(
        vocab_size=257,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=512,
        tie_word_embeddings=False,
    )
    LlamaForCausalLM(config).bfloat16().save_pretrained(folder / "model")
    draw = random.Random(0)
    pairs = [(draw.randrange(1000), draw.randrange(1000)) for _ in range(BATCH * steps)]
    rows = [
        {"instruction": f"Add {a} and {b}.", "input": "", "output": f"The sum is {a + b}."}
        for a, b in pairs
    ]
    data = folder / "tatsu-lab" / "alpaca"
    data.mkdir(parents=True, exist_ok=True)
    (data / "train.json").write_text("".join(json.dumps(row) + "\n" for row in rows))


def config_of(case: Case) -> dict[str, Any]:
    """The example's config with another learning rate and the `zero_optimization` of the case."""
    config: dict[str, Any] = {
        "train_batch_size": BATCH,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "zero_optimization": case.zero,
        "zero_allow_untested_optimizer": True,
    }
    if case.script == ZENFLOW:  # the other script makes its optimizer, whose rate is 1e-3
        params = {"lr": RATE, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.01}
        config["optimizer"] = {"type": "AdamW", "params": params}
    return config


def command_of(case: Case, checkout: Path, steps: int, port: int) -> list[str]:
    """The command line of a run, in its folder."""
    options = ["--deepspeed_config", "ds.json", "--model_name", "model", "--output_dir", "out"]
    options += ["--lr", str(RATE), "--batch_size", str(BATCH), "--num_train_epochs", "1"]
    if case.script == SUPEROFFLOAD:
        options += ["--attn_implementation", "eager", "--max_length", "128"]
        options += ["--bench_steps", str(steps)]
    launch = ["-m", "torch.distributed.run", "--nproc-per-node", str(RANKS)]
    launch += ["--master-port", str(port)]
    return [sys.executable, *launch, str(checkout.resolve() / case.script), *options]


def losses_of(case: Case, checkout: Path, folder: Path, steps: int, port: int) -> list[float]:
    """Run a case; its losses on rank 0. What stands on its last lines is raised if it ends early.

    The ZenFlow example saves on one of its ranks only and then hangs, so the run is ended with its
    last loss.
    """
    (folder / "ds.json").write_text(json.dumps(config_of(case), indent=2))
    environment = {**os.environ, "DSEXT_AUTOLOAD": str(int(case.extended)), "OMP_NUM_THREADS": "1"}
    environment |= {"HF_HUB_OFFLINE": "1", "WANDB_MODE": "disabled", "DSEXT_BIND": "0"}
    found: dict[int, float] = {}
    said: list[str] = []
    with subprocess.Popen(
        command_of(case, checkout, steps, port),
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as job:
        limit = threading.Timer(SECONDS, os.killpg, (job.pid, signal.SIGKILL))
        limit.start()
        try:
            assert job.stdout is not None
            for line in job.stdout:
                said.append(line)
                if match := re.search(r"Step +(\d+)[ ,|]+Loss: ([\d.]+|nan)", line):
                    found.setdefault(int(match[1]), float(match[2]))
                if len(found) == steps:
                    break
        finally:
            limit.cancel()
            with contextlib.suppress(ProcessLookupError):  # all have ended
                os.killpg(job.pid, signal.SIGKILL)
    if len(found) < steps:
        reasons = [line.strip() for line in said if re.match(r"(\[rank\d\]: )?\w+Error: ", line)]
        reason = reasons[0] if reasons else "".join(said[-12:])
        raise RuntimeError(f"{case.name}: {len(found)} of {steps} losses\n{reason}")
    return [found[step] for step in range(1, steps + 1)]


COLORS = {
    "ZeRO-Offload": "#3f51b5",
    "DeepSpeed's ZenFlow": "#c62828",
    "ours, its config": "#ef6c00",
    "ours, predictive": "#2e7d32",
}
WIDTH, HEIGHT, LEFT, TOP, BOTTOM = 540, 430, 58, 60, 300


def picture(losses: dict[str, list[float]]) -> str:
    """The curves of the ZenFlow example as SVG."""
    shown = {name: losses[name] for name in COLORS if name in losses}
    values = [loss for row in shown.values() for loss in row]
    low, high = min(values), max(values)
    count = max(map(len, shown.values()))

    def at(step: int, loss: float) -> str:
        x = LEFT + (WIDTH - LEFT - 20) * step / max(1, count - 1)
        return f"{x:.1f},{TOP + (BOTTOM - TOP) * (high - loss) / (high - low):.1f}"

    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" '
        f'height="{HEIGHT}" font-family="sans-serif" font-size="17" role="img" '
        'aria-label="Losses of DeepSpeed\'s ZenFlow example">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        _text(14, 28, "Loss of DeepSpeed's own ZenFlow example", "font-weight='bold'"),
        f'<path d="M{LEFT},{TOP} V{BOTTOM} H{WIDTH - 20}" fill="none" stroke="#666"/>',
        _text(14, TOP + 6, f"{high:.1f}", ""),
        _text(14, BOTTOM, f"{low:.1f}", ""),
        _text(WIDTH - 90, BOTTOM + 22, f"step {count}", ""),
    ]
    for number, (name, row) in enumerate(shown.items()):
        path = " ".join(at(step, loss) for step, loss in enumerate(row))
        dash = ' stroke-dasharray="8 7"' if name == "ours, predictive" else ""
        lines.append(
            f'<polyline points="{path}" fill="none" '
            f'stroke="{COLORS[name]}" stroke-width="3"{dash}/>'
        )
        y = BOTTOM + 46 + 25 * number
        lines.append(
            f'<path d="M{LEFT},{y - 6} h40" stroke="{COLORS[name]}" stroke-width="3"{dash}/>'
        )
        lines.append(_text(LEFT + 52, y, f"{name}: {row[0]:.3f} to {row[-1]:.3f}", ""))
    return "\n".join([*lines, "</svg>"]) + "\n"


def _text(x: float, y: float, text: str, style: str) -> str:
    return f'<text x="{x:g}" y="{y:g}" {style}>{escape(text)}</text>'


def main(argv: Sequence[str] | None = None) -> int:
    """Run what is asked for, and keep it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--checkout", type=Path, help="of DeepSpeedExamples; without it: draw only")
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--only", default="", help="cases whose name contains this text")
    parser.add_argument("--folder", type=Path, default=ROOT / "outputs" / "deepspeed_examples")
    args = parser.parse_args(argv)
    kept = stored.read(RESULT.name)
    if args.checkout:
        args.folder.mkdir(parents=True, exist_ok=True)
        prepare(args.folder, args.steps)
        for number, case in enumerate(case for case in CASES if args.only in case.name):
            kept["failed"].pop(case.name, None)
            try:
                found = losses_of(case, args.checkout, args.folder, args.steps, 29600 + number)
                kept["losses"][case.name] = found
            except RuntimeError as error:
                kept["failed"][case.name] = str(error).splitlines()[-1]
                sys.stderr.write(f"{error}\n")
        kept["made"] = report.provenance()
        RESULT.write_text(json.dumps(kept, indent=1) + "\n")
    PICTURE.write_text(picture(kept["losses"]))
    for name, row in kept["losses"].items():
        sys.stdout.write(f"{name}: {row[0]:.4f} to {row[-1]:.4f}\n")
    return int(bool(kept["failed"]))


if __name__ == "__main__":
    sys.exit(main())
