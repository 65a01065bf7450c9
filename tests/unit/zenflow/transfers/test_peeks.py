"""How many chunks are peeked at follows what steps wait for."""

from __future__ import annotations

import pytest

from deepspeed_ext.zenflow.transfers.chunks import ChunkOrder

FORWARD, BACKWARD, PEEK, CHUNKS = 0.25, 0.75, 16 / 28, 32
"""In steps, and a peek in passes."""


@pytest.mark.parametrize("seconds", [0.1, 0.5, 1.0, 2.0, 4.0])
def test_steps_wait_hardly_longer_than_with_the_best_number(seconds: float) -> None:
    def waits(peeked: int) -> tuple[float, float]:
        """For weights and for passes, if all passes take `seconds`."""
        first = seconds * (1.0 - (1.0 - PEEK) * peeked / CHUNKS)
        for_weights = max(0.0, first - FORWARD)
        rest = seconds * (1.0 + PEEK * peeked / CHUNKS)
        return for_weights, max(0.0, rest - FORWARD - BACKWARD - for_weights)

    order, seen, last = ChunkOrder([CHUNKS], 1, 1), list[float](), (0.0, 0.0)
    assert order.peeked(CHUNKS) == CHUNKS
    for _ in range(60):
        order.follow(*last, 1.0 + sum(last))  # which are known one step late
        last = waits(order.peeked(CHUNKS))
        seen.append(sum(last))
    best = min(sum(waits(number)) for number in range(CHUNKS + 1))
    assert sum(seen[20:]) / 40 <= best + 0.03 * (1.0 + best)
