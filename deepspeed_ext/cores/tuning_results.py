"""Stores results of ``deepspeed-ext tune``, each for exactly the hardware, ranks and software that
were measured."""

import contextlib
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from deepspeed_ext import __version__
from deepspeed_ext.cores.plan import RankFacts
from deepspeed_ext.cores.topology import Topology
from deepspeed_ext.errors import ConfigError
from deepspeed_ext.runtime.cache import cache_folder, require_own
from deepspeed_ext.runtime.cpulist import MAX_CPU_ID, format_cpulist
from deepspeed_ext.runtime.log import warn_once
from deepspeed_ext.runtime.procfs import read_text

__all__ = ["SCHEMA", "Fingerprint", "as_bytes", "cached", "load_all"]

SCHEMA = 1
# Enough for thousands of CPUs, at about 2 KB each.
_CPUINFO_LIMIT_BYTES = 16 << 20
_KERNEL = "zenflow-adam-pass"
"""The kernel that is tuned: the Adam pass of ZenFlow's optimizer process."""


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
    def of(cls, topology: Topology, ranks: Sequence[RankFacts]) -> "Fingerprint":
        """Return the fingerprint of these ranks (in local-rank order) on this host with the
        installed software."""
        return cls(
            cpu_model=_cpu_model(),
            topology=topology.digest(),
            allowed=tuple(format_cpulist(rank.allowed) for rank in ranks),
            accelerator_nodes=tuple(rank.accelerator_node for rank in ranks),
            quota_cores=min((quota.cores for rank in ranks for quota in rank.quotas), default=None),
            dtype="float32",
            kernel=_KERNEL,
            versions=(("deepspeed_ext", __version__), ("torch", _installed("torch"))),
        )

    @property
    def key(self) -> str:
        """A short hash, which names the result's file."""
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
    """Return the path in the cache of the result for `key`; make the cache folder if there is none.

    Raises:
        ConfigError: there is no cache, or others can write to it.
    """
    if (folder := cache_folder()) is None:
        raise ConfigError(
            "there is no home, so no cache for the result: set DSEXT_CACHE_DIR, or give --output"
        )
    require_own(folder)
    with contextlib.suppress(OSError):  # whoever writes there reports it
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder / f"tune-{key}.json"


def as_bytes(result: Mapping[str, object]) -> bytes:
    """Return a result as it is stored: JSON text."""
    return f"{json.dumps(result, indent=2)}\n".encode()


def load_all() -> dict[str, int]:
    """Read every result in the cache: `Fingerprint.key` -> optimizer cores per rank.

    Never raises, because ranks may read different caches. Files that cannot be read are ignored,
    with one warning.
    """
    found: dict[str, int] = {}
    ignored: list[str] = []
    paths: list[Path] = []
    try:
        if (folder := cache_folder()) is not None:
            require_own(folder)
            paths = sorted(folder.glob("tune-*.json"))
    except (OSError, ValueError, ConfigError) as error:
        ignored = [str(error)]
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
            f"ignoring tuning results that cannot be read: {', '.join(ignored[:3])}{more}. "
            "Delete them and run deepspeed-ext tune again"
        )
    return found


def _read(path: Path) -> int | None:
    """Read the optimizer cores per rank; None if another version wrote the result. Any error is
    passed on."""
    text = read_text(path)
    if text is None:
        raise ValueError("not a readable regular file of at most 64 KiB")
    result = json.loads(text)
    if result["schema"] != SCHEMA:
        return None
    cores = result["opt_cores_per_rank"]
    if type(cores) is not int or not 1 <= cores <= MAX_CPU_ID:
        raise ValueError(
            f"expected opt_cores_per_rank from 1 to {MAX_CPU_ID}, got {str(cores)[:40]}"
        )
    return cores
