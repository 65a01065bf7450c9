"""DeepSpeed's throughput is measured without waiting for what travels beside the next step."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

from deepspeed.accelerator import get_accelerator

from tests.support.models import batches, on_device
from tests.support.ranks import run_ranks
from tests.support.zenflow import make_engine, train, zenflow_config


def device_waits(config: dict[str, Any], steps: int) -> int:
    """How often anyone waits for the whole device in the steps after warm-up."""
    accelerator, engine = get_accelerator(), make_engine(config)
    data = [on_device(batch) for batch in batches(4 + steps, 0)]
    train(engine, data[:4])
    with patch.object(accelerator, "synchronize", wraps=accelerator.synchronize) as synchronize:
        train(engine, data[4:])
    assert 0 < engine.tput_timer.avg_samples_per_sec() < float("inf")
    engine.destroy()
    return synchronize.call_count


def test_no_step_waits_for_the_whole_device() -> None:
    # a choice of the share, once after the warm-up, waits for copies of what it moves
    config = zenflow_config(2, overlap_step=True)
    assert run_ranks(1, device_waits, config, 4, device="sim", pool="simulated, stage 2") == [0]
