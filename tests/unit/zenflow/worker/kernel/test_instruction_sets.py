"""The kernel's sources as they are compiled without vectors, and for the vectors of this CPU.

`python -m tests.perf.instruction_sets` does the same for other CPUs.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.perf.instruction_sets import ONE_TARGET, PLAIN, Target, furthest, results

NATIVE = Target("this CPU's vectors", PLAIN.compiler, ("-march=native", ONE_TARGET))
UNFUSED = ("-ffp-contract=off",)

pytestmark = pytest.mark.skipif(
    PLAIN.missing(set()) is not None, reason=f"no {PLAIN.compiler} here"
)


@pytest.mark.full  # compiles the kernel twice; `test_vectors.py` compares that of this machine
def test_vectors_change_no_bit(tmp_path: Path) -> None:
    """Without fused operations, which round once where others round twice."""
    plain, vectors = (
        results(target, tmp_path, UNFUSED, ["with moments of 8 bits"]) for target in (PLAIN, NATIVE)
    )
    assert len(plain) == 2 * 9 * (3 * 5 + 7)
    assert all(map(torch.equal, plain, vectors))
    half = len(plain) // 2
    assert all(map(torch.equal, plain[:half], plain[half:])), "one thread and two"


def test_a_difference_would_be_found() -> None:
    a = torch.tensor([1.0, -2.0])
    b = a.clone()
    b[0] = torch.nextafter(b[0], torch.tensor(2.0))
    assert furthest([a], [a]) == {"float32": (0, 0.0)}
    assert furthest([b], [a])["float32"][0] == 1
