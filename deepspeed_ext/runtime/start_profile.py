"""Measures time and memory of an optimizer's construction, by phase."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from deepspeed_ext.runtime.backend import get_accelerator
from deepspeed_ext.runtime.profiling import in_profile

__all__ = ["Phase", "StartupProfile"]


@dataclass
class Phase:
    """One kind of work, summed over its calls, without nested phases.

    Attributes:
        seconds: wall-clock time.
        cpu_seconds: CPU time of all threads of this process.
        nbytes: bytes written into new buffers; 0 if unknown.
    """

    name: str
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    nbytes: int = 0
    count: int = 0


class StartupProfile:
    """Measures the phases of construction.

    Attributes:
        peak_accelerator_bytes: peak of allocated accelerator memory; the optimizer sets it.
    """

    def __init__(self) -> None:
        self._phases: dict[str, Phase] = {}
        self._children: list[list[float]] = []
        self.peak_accelerator_bytes = 0
        self._finished = False

    @property
    def phases(self) -> list[Phase]:
        """The phases, in order of their first start."""
        return list(self._phases.values())

    @property
    def seconds(self) -> float:
        """Wall-clock seconds of all phases together."""
        return sum(phase.seconds for phase in self.phases)

    @property
    def cpu_seconds(self) -> float:
        """CPU seconds of all phases together."""
        return sum(phase.cpu_seconds for phase in self.phases)

    def finish(self) -> None:
        """End the measurement: `phase` no longer records or waits for the accelerator."""
        self._finished = True

    @contextmanager
    def phase(self, name: str, nbytes: int = 0) -> Iterator[None]:
        """Add the time of the block to the phase `name`, without that of nested phases. It is also
        a range ``deepspeed_ext.startup.<name>`` of a running profiler.

        Args:
            nbytes: bytes that the block writes into new buffers.
        """
        # the measured methods also run in every step and when a checkpoint is loaded
        if self._finished:
            yield
            return
        get_accelerator().synchronize()
        wall, cpu = time.perf_counter(), time.process_time()
        phase = self._phases.setdefault(name, Phase(name))
        self._children.append([0.0, 0.0])
        try:
            with in_profile(f"startup.{name.replace(' ', '_')}"):
                yield
        finally:
            get_accelerator().synchronize()
            took = [time.perf_counter() - wall, time.process_time() - cpu]
            nested = self._children.pop()
            if self._children:
                self._children[-1] = [
                    sum(pair) for pair in zip(self._children[-1], took, strict=True)
                ]
            phase.seconds += took[0] - nested[0]
            phase.cpu_seconds += took[1] - nested[1]
            phase.nbytes += nbytes
            phase.count += 1

    def table(self) -> str:
        """Describe the phases in a table, one line per phase and a line for the sum."""
        lines = [f"{'phase':<28}{'seconds':>9}{'cpu s':>9}{'MiB':>11}"]
        for phase in self.phases:
            size = f"{phase.nbytes / 2**20:.1f}" if phase.nbytes else ""
            lines.append(
                f"{phase.name:<28}{phase.seconds:>9.3f}{phase.cpu_seconds:>9.3f}{size:>11}"
            )
        lines.append(f"{'sum':<28}{self.seconds:>9.3f}{self.cpu_seconds:>9.3f}")
        return "\n".join(lines)
