"""What Triton makes of the device kernels, for GPUs that need not be here: as a table.

    python -m studies.device_kernels [--block 32] [--dtype bf16]

Seconds are those of Triton and the assembler on this machine, without their caches. Registers are a
thread's; of AMD the vector ones. Bytes an element are what the kernel reads and writes of arrays of
the model's size.
"""

import argparse
import sys
from collections import Counter

import triton

from tests.support.device_kernels import TARGETS, Compiled, Variant, compiled

HEADER = (
    "target",
    "kernel",
    "alignment",
    "seconds",
    "registers",
    "spilled",
    "loads",
    "stores",
    "fused",
    "bytes an element",
)


def variants(block: int, dtype: str) -> list[tuple[str, str, Variant]]:
    """Names and alignments of what a training compiles."""
    estimate = {"weights": dtype, "published": dtype, "grad": dtype}
    moved = {"weights": dtype, "drift": dtype, "grad": dtype}
    elementwise = [
        ("predict", "predict", estimate),
        ("predict with D", "predict", estimate | {"drift": dtype}),
        ("move", "move", moved),
        ("share step", "share_step", {"grad": dtype, "weights": dtype}),
    ]
    found = [
        (name, "16 bytes" if aligned else "none", Variant.of(kernel, dtypes, block, aligned))
        for name, kernel, dtypes in elementwise
        for aligned in (True, False)
    ]
    squares = Variant.of("sums_of_squares", {"like": dtype})
    return [
        *found,
        ("sums of squares", "either", squares),
        ("norms", "either", Variant.of("norms", {})),
    ]


def row(
    target: str, name: str, alignment: str, variant: Variant, made: Compiled
) -> tuple[str, ...]:
    loaded, stored = variant.array_bytes
    return (
        *(target, name, alignment, f"{made.seconds:.2f}", str(made.registers), str(made.spilled)),
        *(widths(made.loads), widths(made.stores), str(len(made.fused))),
        f"{loaded} + {stored}" if loaded else "-",
    )


def widths(accesses: list[int]) -> str:
    """How many accesses of how many bytes."""
    return ", ".join(
        f"{count} x {width}" for width, count in sorted(Counter(accesses).items(), reverse=True)
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--block", type=int, default=32)
    parser.add_argument("--dtype", choices=["bf16", "fp16", "fp32"], default="bf16")
    options = parser.parse_args()
    compiled(Variant.of("norms", {}), "sm_90")  # what Triton loads once is not counted
    lines = [HEADER, ("---",) * len(HEADER)]
    for target in TARGETS:
        for name, alignment, variant in variants(options.block, options.dtype):
            lines.append(row(target, name, alignment, variant, compiled(variant, target)))
    sys.stdout.write("".join(f"| {' | '.join(line)} |\n" for line in lines))
    sys.stdout.write(f"\nTriton {triton.__version__}, blocks of {options.block}, {options.dtype}\n")


if __name__ == "__main__":
    main()
