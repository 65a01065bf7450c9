"""Finds the CPUs that the user or the scheduler allows this process. No plan uses any other CPU."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from deepspeed_ext.cores import initial_mask
from deepspeed_ext.cores.topology import Topology
from deepspeed_ext.errors import ConfigError, UnsupportedError
from deepspeed_ext.runtime.cgroup import read_cpuset
from deepspeed_ext.runtime.cpulist import format_cpulist, parse_cpulist, parse_cpumask
from deepspeed_ext.runtime.procfs import numbered, read_text

__all__ = [
    "ALLOWED_VARIABLE",
    "OMP_BINDING_VARIABLES",
    "Allowed",
    "find_allowed",
    "omp_binding",
    "status_mask",
]

ALLOWED_VARIABLE = "DSEXT_ALLOWED_CPUS"
OMP_BINDING_VARIABLES = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")


@dataclass(frozen=True)
class Allowed:
    """The CPUs that this process may use, where this was read, and warnings for the user."""

    cpus: frozenset[int]
    source: str
    warnings: tuple[str, ...] = ()


def omp_binding(environ: Mapping[str, str]) -> str | None:
    """Return the setting that makes OpenMP bind threads itself, such as ``OMP_PROC_BIND=true``;
    None if none does."""
    for name in OMP_BINDING_VARIABLES:
        value = environ.get(name, "")
        if value and value.lower() not in ("false", "none", "disabled"):
            return f"{name}={value}"
    return None


def find_allowed(
    topology: Topology, root: Path | str = "/", environ: Mapping[str, str] | None = None
) -> Allowed:
    """Find the allowed CPUs of this process (root "/") or of the process that the tree ``root``
    describes.

    The first of these that exists is used: DSEXT_ALLOWED_CPUS; the mask from before torch was
    imported or, while core binding is in force, the CPUs found before it; the union of all threads'
    masks; the calling thread's mask; every online CPU. The result contains online CPUs only.

    Raises:
        ConfigError: DSEXT_ALLOWED_CPUS is malformed, or none of its CPUs is online.
        UnsupportedError: none of the CPUs found elsewhere is online, so the host does not describe
            itself correctly.
    """
    environ = os.environ if environ is None else environ
    live = Path(root) == Path("/")
    stated = environ.get(ALLOWED_VARIABLE)
    initial = initial_mask.initial() if live else None
    if stated:
        try:
            found = Allowed(parse_cpulist(stated), ALLOWED_VARIABLE)
        except ValueError as error:
            raise ConfigError(
                f"the environment variable {ALLOWED_VARIABLE}={stated}: {error}"
            ) from None
    elif initial is not None:
        found = Allowed(
            initial, "mask of the process before torch was imported or core binding began"
        )
    else:
        masks = _thread_masks(Path(root))
        if not masks and live:
            masks = [initial_mask.present()]
        union = frozenset().union(*masks)
        source = "union of the masks of all threads" if union else "every online CPU"
        found = _see_through_omp(
            Allowed(union or topology.cpus, source), topology, Path(root), environ
        )
    if not found.cpus & topology.cpus:
        raise (ConfigError if stated else UnsupportedError)(
            f"none of the allowed CPUs {format_cpulist(found.cpus)} ({found.source}) is online "
            f"(online: {format_cpulist(topology.cpus)})"
        )
    return replace(found, cpus=found.cpus & topology.cpus)


def _thread_masks(root: Path) -> list[frozenset[int]]:
    """Read the masks of all threads from /proc/self below ``root``; empty if they are not there."""
    tasks = [path / "status" for _, path in numbered(root / "proc/self/task", "")]
    masks = [mask for path in tasks if (mask := status_mask(path))]
    return masks or [mask for path in [root / "proc/self/status"] if (mask := status_mask(path))]


def status_mask(status: Path) -> frozenset[int] | None:
    """Read the allowed CPUs from a ``/proc/<pid>/status`` file; None if the file is gone or has no
    such line."""
    fields = dict(
        line.split(":", 1) for line in (read_text(status) or "").splitlines() if ":" in line
    )
    for name, parse in (("Cpus_allowed_list", parse_cpulist), ("Cpus_allowed", parse_cpumask)):
        try:
            mask = parse(fields.get(name, ""))
        except ValueError:
            continue
        if mask:
            return mask
    return None


def _see_through_omp(
    found: Allowed, topology: Topology, root: Path, environ: Mapping[str, str]
) -> Allowed:
    """If OpenMP may have bound the main thread to one core, use the cpuset if there is one;
    otherwise only warn."""
    setting = omp_binding(environ)
    cores = {topology.core_of[cpu].id for cpu in found.cpus & topology.cpus}
    if setting is None or len(cores) != 1 or len(topology.cores) == 1:
        return found
    cpuset = (read_cpuset(root) or topology.cpus) & topology.cpus
    if found.cpus < cpuset < topology.cpus:
        warning = f"{setting} narrowed the mask; using the cpuset instead"
        return Allowed(cpuset, "cpuset of the control group", (warning,))
    warning = (
        f"{setting} may have narrowed the allowed CPUs to {format_cpulist(found.cpus)}; unset it, "
        f"import deepspeed_ext before torch, or list the CPUs in {ALLOWED_VARIABLE}"
    )
    return replace(found, warnings=(warning,))
