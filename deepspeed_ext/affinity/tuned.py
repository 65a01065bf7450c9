"""Results of ``deepspeed-ext tune`` on disk, found again only for exactly the situation that was measured."""

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from deepspeed_ext._cache import cache_folder
from deepspeed_ext._version import __version__
from deepspeed_ext.affinity.cpulist import format_cpulist
from deepspeed_ext.affinity.plan import RankFacts
from deepspeed_ext.affinity.topology import Topology
from deepspeed_ext.affinity.tree import read_text

__all__ = ["DEFAULT_KERNEL", "SCHEMA", "Fingerprint", "cache_folder", "load_all", "save"]

SCHEMA = 1
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
    fields = dict(line.split(":", 1) for line in (read_text(Path("/proc/cpuinfo")) or "").splitlines() if ":" in line)
    named = {key.strip(): value.strip() for key, value in fields.items()}
    return named.get("model name") or named.get("cpu") or named.get("CPU part") or "unknown"


def save(key: str, result: dict[str, object], path: Path | None = None) -> Path:
    """Write a result, atomically, to ``path`` or to its place in the cache; returns where."""
    path = path or cache_folder() / f"tune-{key}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f"{path.name}.{os.getpid()}")
    scratch.write_text(json.dumps(result, indent=2) + "\n")
    scratch.replace(path)
    return path


def load_all() -> dict[str, int]:
    """Optimizer cores of a rank by fingerprint key, for every readable result in the cache."""
    found = {}
    for path in sorted(cache_folder().glob("tune-*.json")):
        try:
            result = json.loads(path.read_text())
            if result["schema"] == SCHEMA and int(result["opt_cores_per_rank"]) >= 1:
                found[path.stem.removeprefix("tune-")] = int(result["opt_cores_per_rank"])
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return found
