"""Target: files in the cache for tuning results. What is a result is found, anything else is
ignored."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

from deepspeed_ext.cores import tuning_results
from deepspeed_ext.cores.exchange import RankReport, agree
from deepspeed_ext.cores.plan import PlanRequest, RankFacts
from deepspeed_ext.cores.topology import Topology
from deepspeed_ext.runtime.cpulist import format_cpulist
from deepspeed_ext.runtime.ranks import RankGroup
from tests.fuzz import values
from tests.fuzz.target import Parts, Target
from tests.support.topologies import cores

TOPOLOGY = Topology(tuple(cores(8)))
FACTS = RankFacts(0, TOPOLOGY.cpus)
PLACES = ("fifo", "folder", "loop", "endless")


def make(rng: random.Random) -> Parts:
    """Files: (name, content); a content that is no bytes is what stands in place of a file."""
    return [
        (rng.choice(["KEY", f"{rng.randrange(9)}"]), _content(rng))
        for _ in range(rng.randint(1, 4))
    ]


def _content(rng: random.Random) -> bytes | str:
    if rng.random() < 0.15:
        return rng.choice(PLACES)
    if rng.random() < 0.1:
        return rng.choice([b"[", b'{"schema":']) * rng.choice([10, 5_000, 30_000])
    result: Any = {"schema": 1, "key": "x", "opt_cores_per_rank": rng.randint(1, 9), "points": []}
    for _ in range(rng.randint(0, 3)):
        result[rng.choice([*result, values.text(rng)])] = values.value(rng, 2)
    try:
        text = json.dumps(result)
    except (RecursionError, ValueError):  # ValueError: a number of too many digits for text
        text = "{"
    for _ in range(rng.choice([0, 0, 1, 3])):
        position = rng.randrange(len(text) + 1)
        text = (
            text[:position]
            + rng.choice(["9" * 400, "1e999", "}", '"', "\0", "", "NaN"])
            + text[position + 1 :]
        )
    return text.encode(errors="surrogatepass")


def run(parts: Parts, folder: Path) -> None:
    os.environ["DSEXT_CACHE_DIR"] = str(folder)
    key = tuning_results.Fingerprint.of(TOPOLOGY, [FACTS]).key
    for name, content in parts:
        path = folder / f"tune-{name.replace('KEY', key)}.json"
        if not os.path.lexists(path):
            _put(path, content)
    found = tuning_results.load_all()
    assert all(isinstance(cores, int) and cores >= 1 for cores in found.values())
    report = RankReport(
        0, "host", 0, format_cpulist(FACTS.allowed), TOPOLOGY.digest(), PlanRequest(), tuned=found
    )
    agreement = agree(report, TOPOLOGY, RankGroup.alone())
    assert agreement.mine is not None
    assert agreement.mine.optimizer


def _put(path: Path, content: bytes | str) -> None:
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content == "fifo":
        os.mkfifo(path)
    elif content == "folder":
        path.mkdir()
    else:
        path.symlink_to(path.name if content == "loop" else "/dev/zero")


TARGET = Target("tuning", make, run)
