"""The kernels in Triton's interpreter, beside their definition."""

import os
import subprocess
import sys

import pytest


@pytest.mark.parametrize("cases", [4, pytest.param(1500, marks=pytest.mark.full)])
def test_kernels_equal_their_definition_to_the_bit(cases: int) -> None:
    """Invented lengths, blocks, offsets, dtypes and numbers, some not finite, negative zero or
    subnormal."""
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-m",
        "tests.support.interpreted_kernels",
        str(cases),
        "1",
    ]
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, check=False, env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith(f"{cases} cases"), done.stdout
