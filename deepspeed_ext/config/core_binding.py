"""The ``core_binding`` section, and the type of a number of reserved cores."""

from typing import Annotated

from pydantic import AfterValidator, Field, StrictFloat, StrictInt

from deepspeed_ext.config.section import ConfigSection
from deepspeed_ext.runtime.reserved_cores import check_reserved_cores

__all__ = ["CoreBindingConfig", "ReservedCores"]

MOST_CORES = 2**16
"""More than a Linux host can have (``NR_CPUS``)."""


def _few_enough(cores: int | float) -> int | float:
    if cores > MOST_CORES:
        raise ValueError(f"expected at most {MOST_CORES} cores, got {cores}")
    return cores


ReservedCores = Annotated[
    StrictInt | StrictFloat, AfterValidator(_few_enough), AfterValidator(check_reserved_cores)
]
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
