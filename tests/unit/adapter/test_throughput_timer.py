"""DeepSpeed's throughput is measured without waiting for what travels beside the next step."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.utils.config import get_timers_config

from deepspeed_ext.adapter import stand_ins
from deepspeed_ext.adapter.stand_ins import StreamThroughputTimer
from tests.support.models import batches, on_device
from tests.support.ranks import run_ranks
from tests.support.zenflow import make_engine, train, zenflow_config


def waits_of_a_timer(synchronized: bool) -> list[tuple[bool, bool]]:
    """After start and stop: is all work of the current stream done, and that of another?"""
    accelerator = get_accelerator()
    config = get_timers_config(
        {"timers": {"throughput": {"enabled": True, "synchronized": synchronized}}}
    )
    timer, other, found = StreamThroughputTimer(config, batch_size=1), accelerator.Stream(), []
    for call in [timer.start, timer.stop] * 3:
        work = torch.zeros(1, dtype=torch.float32, device=accelerator.current_device_name()) + 1
        with accelerator.stream(other):
            work_beside = (
                torch.zeros(1, dtype=torch.float32, device=accelerator.current_device_name()) + 1
            )
        call()
        found.append((accelerator.current_stream().query(), other.query()))
        accelerator.synchronize()
        del work, work_beside
    return found


@pytest.mark.parametrize("synchronized", [True, False])
def test_the_timer_waits_for_the_current_stream_alone(synchronized: bool) -> None:
    found = run_ranks(1, waits_of_a_timer, synchronized, device="sim", pool="simulated, stage 2")[0]
    assert set(found) == {(synchronized, False)}


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
    config = zenflow_config(2, overlap_step=True)
    assert run_ranks(1, device_waits, config, 4, device="sim", pool="simulated, stage 2") == [0]


@pytest.mark.parametrize(("synchronized", "waits"), [(True, [0, 1, 2]), (False, [0, 0, 0])])
def test_a_timer_waits_once_a_call_and_not_for_a_stop_without_a_start(
    synchronized: bool, waits: list[int]
) -> None:
    accelerator = Mock()
    accelerator.is_synchronized_device.return_value = False
    config = get_timers_config(
        {"timers": {"throughput": {"enabled": True, "synchronized": synchronized}}}
    )
    with patch.object(stand_ins, "get_accelerator", lambda: accelerator):
        timer, found = StreamThroughputTimer(config, batch_size=1), []
        for call in (timer.stop, timer.start, timer.stop):
            call()
            found.append(accelerator.current_stream.return_value.synchronize.call_count)
    assert found == waits
