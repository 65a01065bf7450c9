"""Results of ``deepspeed-ext tune`` on disk, found again only for exactly the situation that was measured."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from deepspeed_ext._cache import cache_folder
from deepspeed_ext._errors import ConfigError
from deepspeed_ext._logging import warn_once
from deepspeed_ext._output_file import OutputFile
from deepspeed_ext._version import __version__
from deepspeed_ext.affinity.plan import RankFacts
from deepspeed_ext.affinity.topology import Topology
from deepspeed_ext.host.cpulist import MAX_CPU_ID, format_cpulist
from deepspeed_ext.host.procfs import read_text

__all__ = ["DEFAULT_KERNEL", "SCHEMA", "Fingerprint", "as_bytes", "cache_folder", "cached", "load_all", "save"]

SCHEMA = 1
# Thousands of CPUs at about two kilobytes each.
_CPUINFO_LIMIT_BYTES = 16 << 20
DEFAULT_KERNEL = "zenflow-adam-pass"
"""What is tuned for: the pass over memory that ZenFlow's optimizer process makes."""


@dataclass(frozen=True)
class Fingerprint:
    """Everything a tuning result depends on."""

    cpu_model: str
    topology: str
    allowed: tuple[str, ...]
    accelerator_nodes: tuple[int | None, ...]
    quota_cores: float | None
    dtype: str
    kernel: str
    versions: tuple[tuple[str, str], ...]

    @classmethod
    def of(cls, topology: Topology, ranks: Sequence[RankFacts], kernel: str = DEFAULT_KERNEL) -> "Fingerprint":
        """The fingerprint of these ranks, in local-rank order, on this host with the installed software."""
        return cls(
            cpu_model=_cpu_model(),
            topology=topology.digest(),
            allowed=tuple(format_cpulist(rank.allowed) for rank in ranks),
            accelerator_nodes=tuple(rank.accelerator_node for rank in ranks),
            quota_cores=min((rank.quota_cores for rank in ranks if rank.quota_cores is not None), default=None),
            dtype="float32",
            kernel=kernel,
            versions=(("deepspeed_ext", __version__), ("torch", _installed("torch"))),
        )

    @property
    def key(self) -> str:
        """A short name for it."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:16]


def _installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"


def _cpu_model() -> str:
    text = read_text(Path("/proc/cpuinfo"), _CPUINFO_LIMIT_BYTES) or ""
    fields = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
    named = {key.strip(): value.strip() for key, value in fields.items()}
    return named.get("model name") or named.get("cpu") or named.get("CPU part") or "unknown"


def cached(key: str) -> Path:
    """Where the result for `key` belongs in the cache.

    Raises:
        ConfigError: there is no home directory, and no variable names a cache.
    """
    try:
        return cache_folder() / f"tune-{key}.json"
    except RuntimeError as error:
        raise ConfigError(f"there is no place for a cache ({error}): set DSEXT_CACHE_DIR to a folder") from None


def as_bytes(result: Mapping[str, object]) -> bytes:
    """A result as it is on disk."""
    return f"{json.dumps(result, indent=2)}\n".encode()


def save(key: str, result: Mapping[str, object]) -> Path:
    """Write a result, atomically, to its place in the cache; returns where.

    Raises:
        ConfigError: the cache cannot be written.
    """
    target = OutputFile.check(cached(key), "the tuning result")
    target.write(as_bytes(result))
    return target.path


def load_all() -> dict[str, int]:
    """Optimizer cores of a rank by fingerprint key, for every result in the cache.

    Never raises, because one rank may read another cache than the others: what cannot be read is ignored, and one
    warning says so.
    """
    found: dict[str, int] = {}
    ignored: list[str] = []
    try:
        paths = sorted(cache_folder().glob("tune-*.json"))
    except (OSError, RuntimeError, ValueError) as error:  # RuntimeError: no home directory
        paths, ignored = [], [str(error)]
    for path in paths:
        try:
            cores = _read(path)
        except Exception as error:
            ignored.append(f"{path} ({type(error).__name__}: {str(error)[:80]})")
            continue
        if cores is not None:
            found[path.stem.removeprefix("tune-")] = cores
    if ignored:
        more = f" and {len(ignored) - 3} more" if len(ignored) > 3 else ""
        warn_once(
            f"tuning results that cannot be read are ignored: {', '.join(ignored[:3])}{more}. "
            "Delete them and run deepspeed-ext tune again"
        )
    return found


def _read(path: Path) -> int | None:
    """Optimizer cores of a rank; None if another version wrote the result. Raises whatever reading it raises."""
    text = read_text(path)
    if text is None:
        raise ValueError("not a readable regular file of at most 64 KiB")
    result = json.loads(text)
    if result["schema"] != SCHEMA:
        return None
    cores = result["opt_cores_per_rank"]
    if type(cores) is not int or not 1 <= cores <= MAX_CPU_ID:
        raise ValueError("opt_cores_per_rank is not a number of cores")
    return cores
