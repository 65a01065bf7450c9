"""The arguments of ``deepspeed-ext plan --memory``."""

from __future__ import annotations

import argparse
from typing import Any

from deepspeed_ext.commands.argument_types import (
    MAX_JOB_RANKS,
    MAX_RANKS,
    MAX_TOKENS,
    gib,
    numel,
    speed,
    whole,
)

__all__ = ["add_arguments"]

_RANKS: dict[str, Any] = {"metavar": "N", "type": whole(1, MAX_JOB_RANKS)}
_TOKENS: dict[str, Any] = {"metavar": "N", "type": whole(1, MAX_TOKENS)}
_CARDS = ("rtx3090", "rtx4090", "rtx5090", "l40s", "a100", "h100", "h200")
_OPTIONS: dict[tuple[str, ...], tuple[str, dict[str, Any]]] = {
    ("--params",): ("parameters, such as 7e9, 7B or 124M", {"metavar": "P", "type": numel}),
    ("--model",): (
        "a transformers config.json, its folder, or a name such as qwen2.5-7b",
        {"metavar": "PATH"},
    ),
    ("--ranks", "--gpus"): ("data-parallel ranks", _RANKS),
    ("--ranks-per-host", "--gpus-per-host"): (
        "ranks that share a host [all of them]",
        {"metavar": "N", "type": whole(1, MAX_RANKS)},
    ),
    ("--config",): ("plan this DeepSpeed config [a table of all ways]", {"metavar": "FILE"}),
    ("--dtype",): (
        "dtype of the weights [the config's, or bf16]",
        {"choices": ("bf16", "fp16", "fp32")},
    ),
    ("--largest-param",): (
        "elements of the largest parameter [a typical model's]",
        {"metavar": "L", "type": numel},
    ),
    ("--card",): ("memory and speeds of this card [by --gpu-gb]", {"choices": _CARDS}),
    ("--host",): ("speed of the host's memory [the card's]", {"choices": ("desktop", "server")}),
    **{
        (f"--{place}-gib", f"--{short}-gb"): (
            f"GiB of one {place}, or here for this machine's [unknown]",
            {"metavar": "G", "type": gib},
        )
        for place, short in (("accelerator", "gpu"), ("host", "host"))
    },
    **{
        (option,): (f"{of} [the card's or host's]", {"metavar": "X", "type": speed})
        for option, of in (
            ("--link-gbps", "GB/s between a GPU and its host, each way"),
            ("--host-gbps", "GB/s of a host's memory"),
            ("--tflops", "TFLOP/s that a GPU sustains"),
        )
    },
    ("--tokens",): ("tokens per GPU and optimizer step [8192]", _TOKENS),
    ("--seq-len",): ("tokens per GPU whose activations are held at once [4096]", _TOKENS),
    **{
        (option,): (f"{of} [no]", {"action": "store_const", "const": True})
        for option, of in (
            ("--fused-loss", "the loss makes no logits of all tokens (use_liger_kernel)"),
            ("--keep-activations", "activations are not recomputed in backward"),
            ("--all", "show every way, not the best of each kind"),
        )
    },
    ("--write",): ("write the config of the suggested run", {"metavar": "FILE"}),
    ("--for",): (
        "with --write: for deepspeed.initialize, or for the Hugging Face Trainer [script]",
        {"choices": ("script", "trainer")},
    ),
}


def add_arguments(plan: argparse.ArgumentParser) -> None:
    """Add ``--memory`` and what only it takes. Without torch: the parser of all commands does."""
    plan.add_argument("--memory", action="store_true", help="plan memory instead of cores")
    for names, (help_text, how) in _OPTIONS.items():
        plan.add_argument(*names, help=f"with --memory: {help_text}", **how)
