"""What Triton makes of the kernels for GPUs that are not here, read from the assembly."""

import itertools

import pytest

from tests.support.device_kernels import ELEMENT_BYTES, TARGETS, Variant, compiled

ARRAYS = {"predict": ("weights", "published", "grad"), "adam_step": ("grad", "weights")}

BY_DEFAULT = {*itertools.product(ARRAYS, ("sm_80", "sm_120", "gfx942"))}


def variant(kernel: str, block: int = 32, aligned: bool = True, **dtypes: str) -> Variant:
    return Variant.of(
        kernel, {name: dtypes.get(name, "bf16") for name in ARRAYS[kernel]}, block, aligned
    )


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("kernel", "target"),
    [
        pytest.param(
            kernel, target, marks=() if (kernel, target) in BY_DEFAULT else pytest.mark.full
        )
        for kernel, target in itertools.product(ARRAYS, TARGETS)
    ],
)
def test_a_kernel_reads_16_bytes_at_once_and_rounds_each_operation(
    kernel: str, target: str
) -> None:
    """Nothing spills, and no product and sum are rounded as one. Arrays of the model's size are
    read and written in accesses of 16 bytes; narrower ones are those of numbers per block and of a
    short last block."""
    made = compiled(variant(kernel), target)
    assert made.spilled == 0
    assert made.fused == []
    assert made.loads.count(16) >= len(ARRAYS[kernel]) - 1, made.loads
    assert max(made.stores) == 16
    narrow = [width for width in made.stores if width < 16]
    assert len(narrow) <= (kernel != "adam_step"), "one short block"


def test_codes_are_read_and_written_8_at_once() -> None:
    """And scales one by one."""
    dtypes = {"grad": "bf16", "weights": "bf16", "m": "i8", "v": "u8"}
    made = compiled(Variant.of("adam_step", dtypes), "sm_90")
    assert (made.spilled, made.fused) == (0, [])
    assert sorted(made.loads) == [1, 1, 8, 8, 16, 16, 16]
    assert sorted(made.stores) == [1, 1, 8, 8, 16, 16, 16]


def test_16_bit_results_are_rounded_to_nearest() -> None:
    stored = compiled(variant("predict"), "sm_90").assembly
    assert "cvt.rn.bf16x2.f32" in stored
    assert "cvt.rz" not in stored
    assert "cvt.rn.f16x2.f32" in compiled(variant("predict", weights="fp16"), "sm_90").assembly


def test_an_unaligned_array_is_read_an_element_at_a_time() -> None:
    """An access of a GPU must begin at a multiple of its size."""
    made = compiled(variant("predict", aligned=False), "sm_90")
    assert max(made.loads) == 4, "a number of a block"
    assert set(made.stores) == {ELEMENT_BYTES["bf16"]}
    assert (made.spilled, made.fused) == (0, [])


@pytest.mark.full
@pytest.mark.parametrize("target", ["sm_80", "sm_90", "gfx942"])
@pytest.mark.parametrize("block", [8, 24, 256])
@pytest.mark.parametrize("aligned", [True, False])
@pytest.mark.parametrize(
    ("array", "dtype"), [*itertools.product(ARRAYS["predict"], ("fp32", "fp16"))]
)
def test_no_dtypes_and_blocks_spill(
    target: str, block: int, aligned: bool, array: str, dtype: str
) -> None:
    for kernel in ("predict", "adam_step"):
        if array in ARRAYS[kernel]:
            made = compiled(variant(kernel, block, aligned, **{array: dtype}), target)
            assert (made.spilled, made.fused) == (0, [])
