"""The ``core_binding`` section, and the type of a number of reserved cores."""

from typing import Annotated

from pydantic import AfterValidator, Field, StrictFloat, StrictInt

from deepspeed_ext.config.section import ConfigSection

__all__ = ["CoreBindingConfig", "ReservedCores"]

MOST_CORES = 2**16
"""More than a Linux host can have (``NR_CPUS``)."""


def _number_of_cores(value: int | float) -> int | float:
    if not (1 <= value <= MOST_CORES if isinstance(value, int) else 0.0 < value < 1.0):
        raise ValueError(
            f"expected a count of 1 to {MOST_CORES} cores as a whole number, or a fraction of the "
            f"cores above 0 and below 1, got {value}"
        )
    return value


ReservedCores = Annotated[StrictInt | StrictFloat, AfterValidator(_number_of_cores)]
"""Cores to keep for PyTorch: an int is a count of at least 1, a float is a fraction strictly
between 0 and 1."""


class CoreBindingConfig(ConfigSection):
    """Chooses the CPU cores of PyTorch and of the optimizer process."""

    enabled: bool | None = None
    """Bind this rank's threads to its share of the host's cores. Not given: true if ZenFlow is on.

    With ZenFlow, PyTorch and the optimizer process get disjoint cores. With plain ZeRO-Offload,
    where the optimizer runs on PyTorch's threads, each rank is bound to its share of the host's
    cores.
    """

    optimizer_cores: Annotated[int, Field(ge=1, le=MOST_CORES)] | None = None
    """Cores per rank for the optimizer process. Not given: what ``zenflow.pt_reserved_cores``
    leaves."""

    dry_run: bool = False
    """Log the core plan without binding anything."""
