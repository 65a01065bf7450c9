"""The worker's passes as each instruction set computes them: for this CPU, and emulated for others.

    python -m tests.perf.instruction_sets

Compiles the kernel's sources with `instruction_sets.cpp` once per target, runs each result, and
compares all arrays with those of the plain build, which uses no vectors at all. A target whose
compiler or emulator is not installed is skipped by name (Debian: g++-aarch64-linux-gnu,
qemu-user-static, clang). With ``-ffp-contract=off`` no compiler fuses a multiplication and an
addition, and every build must give the same bits.
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from deepspeed_ext.zenflow.worker.kernel.compile_flags import COMPILE_FLAGS
from deepspeed_ext.zenflow.worker.kernel.library import BUILT

DRIVER = Path(__file__).with_suffix(".cpp")
ONE_TARGET = "-DDSEXT_ONE_TARGET"
INTEGERS = {"float32": torch.int32, "bfloat16": torch.int16, "float16": torch.int16}


@dataclass(frozen=True)
class Target:
    """How the kernel is compiled, and where it runs."""

    name: str
    compiler: str
    flags: tuple[str, ...] = ()
    emulator: tuple[str, ...] = ()
    needs: str = ""
    """A flag of /proc/cpuinfo."""

    def missing(self, cpu: set[str]) -> str | None:
        """What it lacks here."""
        programs = (self.compiler, *self.emulator[:1])
        lacking = [name for name in programs if shutil.which(name) is None]
        return ", ".join(lacking) or (
            f"a CPU with {self.needs}" if self.needs and self.needs not in cpu else None
        )


PLAIN = Target(
    "x86-64, no vectors (the plain build)", "g++", ("-O1", "-fno-tree-vectorize", ONE_TARGET)
)
ARM = ("qemu-aarch64-static", "-L", "/usr/aarch64-linux-gnu")
TARGETS = (
    PLAIN,
    Target("x86-64, SSE2", "g++", ("-march=x86-64", ONE_TARGET)),
    Target("x86-64-v3, AVX2", "g++", ("-march=x86-64-v3", ONE_TARGET), needs="avx2"),
    Target("x86-64-v4, AVX-512", "g++", ("-march=x86-64-v4", ONE_TARGET), needs="avx512vl"),
    Target("x86-64 as in the wheel, on this CPU", "g++"),
    Target(
        "x86-64 as in the wheel, emulated CPU without AVX",
        "g++",
        emulator=("qemu-x86_64-static", "-cpu", "Nehalem"),
    ),
    Target(
        "x86-64 as in the wheel, emulated CPU with AVX2",
        "g++",
        emulator=("qemu-x86_64-static", "-cpu", "Haswell"),
    ),
    Target("x86-64, clang", "clang++"),
    Target(
        "aarch64, no vectors, emulated",
        "aarch64-linux-gnu-g++",
        ("-O1", "-fno-tree-vectorize"),
        ARM,
    ),
    Target("aarch64, NEON, emulated", "aarch64-linux-gnu-g++", (), ARM),
)


def arrays(output: bytes) -> Iterator[torch.Tensor]:
    """What the driver wrote."""
    while output:
        line, _, output = output.partition(b"\n")
        _, kind, numel = line.decode().split()
        dtype = getattr(torch, kind)
        size = int(numel) * dtype.itemsize
        yield torch.frombuffer(bytearray(output[:size]), dtype=dtype)
        output = output[size:]


def results(
    target: Target, folder: Path, extra: Sequence[str] = (), arguments: Sequence[str] = ()
) -> list[torch.Tensor]:
    """Compile, run with `arguments`, and return all arrays."""
    flags = [*COMPILE_FLAGS, *target.flags, *extra]
    program = folder / "-".join([target.compiler, *flags])
    if not program.exists():
        command = [
            target.compiler,
            *flags,
            "-I",
            str(BUILT.parent),
            str(DRIVER),
            "-o",
            str(program),
        ]
        subprocess.run(command, check=True)
    command = [*target.emulator, str(program), *arguments]
    return list(arrays(subprocess.run(command, capture_output=True, check=True).stdout))


def furthest(
    ours: Sequence[torch.Tensor], plain: Sequence[torch.Tensor]
) -> dict[str, tuple[int, float]]:
    """By type, the largest distance in units of the last place, and relative to the array's largest
    value."""
    found: dict[str, tuple[int, float]] = {}
    for a, b in zip(ours, plain, strict=True):
        name = str(a.dtype).removeprefix("torch.")
        steps = (a.view(INTEGERS[name]).long() - b.view(INTEGERS[name]).long()).abs().max().item()
        share = ((a.double() - b.double()).abs().max() / b.double().abs().max()).item()
        before = found.get(name, (0, 0.0))
        found[name] = (max(before[0], int(steps)), max(before[1], share))
    return found


def main() -> None:
    words = Path("/proc/cpuinfo").read_text().partition("\nflags")[2].partition("\n")[0]
    cpu = set(words.split())
    print(
        "| target | fp32: last places, share | bfloat16 | float16 "
        "| without fused multiply-add |\n|---|---|---|---|---|"
    )
    references: list[list[torch.Tensor]] = []
    with tempfile.TemporaryDirectory() as name:
        for target in TARGETS:
            if lacks := target.missing(cpu):
                print(f"| {target.name} | skipped: no {lacks} | | | |")
                continue
            found = [results(target, Path(name), extra) for extra in ((), ("-ffp-contract=off",))]
            references = references or found
            usual = furthest(found[0], references[0])
            cells = [f"{steps}, {share:.1e}" for steps, share in (usual[kind] for kind in INTEGERS)]
            same = all(map(torch.equal, found[1], references[1]))
            print(
                f"| {target.name} | {' | '.join(cells)} | {'same bits' if same else 'DIFFERS'} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
