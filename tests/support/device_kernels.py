"""Compiles the device kernels for GPUs that are not here, and reads what the compiler made."""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
import time
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource

from deepspeed_ext.zenflow.kernels import device, launch

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "sm_120": GPUTarget("cuda", 120, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
"""sm_120 is the newest architecture of NVIDIA that Triton 3.9's ptxas knows."""

ELEMENT_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "i8": 1, "u8": 1}
_TYPES = {"m_scales": "u8", "v_scales": "u8"}


@dataclass(frozen=True)
class Variant:
    """A kernel, the dtypes of its arrays by name, and the constants it is compiled for."""

    kernel: str
    dtypes: tuple[tuple[str, str], ...]
    constants: tuple[tuple[str, Any], ...]

    @classmethod
    def of(
        cls, kernel: str, dtypes: dict[str, str], block: int = 32, aligned: bool = True
    ) -> Variant:
        """The variant that `launch` takes: dtypes by array, such as ``{"weights": "bf16"}``; others
        are fp32."""
        constants = launch.shape_constants(kernel, block, aligned)
        return cls(kernel, tuple(dtypes.items()), tuple(constants.items()))

    def source(self) -> ASTSource:
        """What Triton compiles if nothing is specialized."""
        function = getattr(device, self.kernel)
        dtypes = dict(self.dtypes)
        constants = dict(self.constants)
        signature: dict[str, str] = {}
        for parameter in function.params:
            if parameter.name in constants:
                signature[parameter.name] = "constexpr"
            elif parameter.annotation_type:
                signature[parameter.name] = parameter.annotation_type
            else:
                default = _TYPES.get(parameter.name, "fp32")
                signature[parameter.name] = f"*{dtypes.get(parameter.name, default)}"
        return ASTSource(fn=function, signature=signature, constexprs=constants)


@dataclass(frozen=True)
class Compiled:
    """What the compiler made of a variant.

    Attributes:
        assembly: PTX, or the assembly of AMD.
        seconds: that Triton took, ptxas included.
        ir: LLVM's, before it is made assembly.
        registers: of a thread.
        spilled: bytes of a thread's registers that spilled (of AMD: registers).
        loads, stores: bytes of each access to global memory, in order.
    """

    assembly: str
    ir: str
    seconds: float
    registers: int
    spilled: int
    loads: list[int]
    stores: list[int]

    @property
    def fused(self) -> list[str]:
        """What rounds a product and a sum of fp32 once, or lets the assembler do so. AMD divides
        and takes roots with such instructions, so there LLVM's code is looked at, which has
        divisions as they are."""
        if "amdhsa" in self.ir:
            return re.findall(
                r"llvm\.fma\S*|llvm\.fmuladd\S*|f(?:mul|add|sub) (?:contract|fast|reassoc)", self.ir
            )
        return re.findall(r"\bfma\.\S*f32\S*|\b(?:mul|add|sub)\.(?:ftz\.)?f32\b", self.assembly)


def compiled(variant: Variant, target: str) -> Compiled:
    """Compile a variant for a target, as `launch` would on such a device."""
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as cache, patch.dict(os.environ, TRITON_CACHE_DIR=cache):
        made = triton.compile(
            variant.source(), target=TARGETS[target], options=dict(launch.OPTIONS)
        )
    seconds = time.perf_counter() - begin
    if "ptx" in made.asm:
        registers, spilled = _ptxas(made.asm["ptx"], TARGETS[target].arch)
        return Compiled(
            made.asm["ptx"],
            made.asm["llir"],
            seconds,
            registers,
            spilled,
            *_ptx_accesses(made.asm["ptx"]),
        )
    text = made.asm["amdgcn"]
    registers, spilled = (
        int(re.search(rf"\.{name}:\s+(\d+)", text)[1])  # type: ignore[index]
        for name in ("vgpr_count", "vgpr_spill_count")
    )
    return Compiled(text, made.asm["llir"], seconds, registers, spilled, *_amd_accesses(text))


def _ptxas(ptx: str, arch: int) -> tuple[int, int]:
    """Registers and spilled bytes of a thread, as ptxas says."""
    ptxas = get_ptxas(arch).path
    name = re.search(r"\.target (sm_\w+)", ptx)[1]  # type: ignore[index]
    with tempfile.TemporaryDirectory() as folder:
        source = os.path.join(folder, "kernel.ptx")
        with open(source, "w") as file:
            file.write(ptx)
        command = [
            ptxas,
            "-v",
            f"--gpu-name={name}",
            source,
            "-o",
            os.path.join(folder, "kernel.cubin"),
        ]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    spills = sum(map(int, re.findall(r"(\d+) bytes spill", said)))
    return int(re.search(r"Used (\d+) registers", said)[1]), spills  # type: ignore[index]


def _ptx_accesses(ptx: str) -> tuple[list[int], list[int]]:
    def widths(kind: str) -> list[int]:
        found = re.findall(rf"\b{kind}\.global(?:\.[a-z_]+\w*)*?(?:\.v(\d))?\.[busf](\d+)\b", ptx)
        return [int(count or 1) * int(bits) // 8 for count, bits in found]

    return widths("ld"), widths("st")


def _amd_accesses(text: str) -> tuple[list[int], list[int]]:
    sizes = {"dwordx4": 16, "dwordx3": 12, "dwordx2": 8, "dword": 4}

    def widths(kind: str) -> list[int]:
        names = re.findall(rf"\b(?:global|buffer|flat)_{kind}_(\w+)", text)
        return [sizes.get(name, 1 if "byte" in name else 2) for name in names]

    return widths("load"), widths("store")
