"""Stopwatches measure laps: of the host at once, of a stream when its work is done."""

from __future__ import annotations

from unittest.mock import Mock, patch

import pytest
import torch
from deepspeed.accelerator import get_accelerator

from deepspeed_ext.runtime import timing
from deepspeed_ext.runtime.timing import Stopwatch
from tests.support.ranks import run_ranks

OPERATOR_US = 100.0


def test_the_cpu_is_measured_by_the_host() -> None:
    watch = Stopwatch()
    with patch.object(timing.time, "perf_counter", Mock(side_effect=[1.0, 3.0, 10.0, 15.0])):
        for _ in range(2):
            with watch.measured():
                pass
    assert watch.lap() == [7.0]
    assert watch.lap() == [0.0]


def test_what_was_not_started_is_not_measured() -> None:
    watch = Stopwatch()
    watch.stop()
    assert watch.lap() == [0]


def laps_of_a_stream() -> tuple[list[float], list[float]]:
    """Laps before the host waits for the device and after it."""
    from tests.support.simulated_accelerator import simulation

    device, watch = get_accelerator().current_device_name(), Stopwatch()
    ones = torch.ones(4, dtype=torch.float32, device=device)
    with simulation.timeline(operator_us=OPERATOR_US, memory_gb_per_s=1e9):
        found = []
        for count in (1, 2):
            with watch.measured():
                for _ in range(count):
                    ones.add(1)
            ones.add(1)  # between two measurements
            with watch.measured():
                ones.add(1)
            found += watch.lap()
        get_accelerator().synchronize()
        return found, watch.lap()


def test_a_stream_is_measured_without_waiting_for_it() -> None:
    before, after = run_ranks(1, laps_of_a_stream, device="sim", pool="simulated time")[0]
    assert before == []
    assert after == pytest.approx([2 * OPERATOR_US / 1e6, 3 * OPERATOR_US / 1e6, 0.0], rel=1e-3)


def test_a_moment_is_recorded_on_the_stream_that_is_given_or_the_current_one() -> None:
    accelerator = Mock()
    accelerator.is_synchronized_device.return_value = False
    with patch.object(timing, "get_accelerator", lambda: accelerator):
        watch = Stopwatch()
        watch.start("another stream")
        watch.stop()
    assert [call.args for call in accelerator.Event.return_value.record.call_args_list] == [
        ("another stream",),
        (accelerator.current_stream.return_value,),
    ]
