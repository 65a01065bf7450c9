"""One rank of `tests.perf.startup_breakdown`: starts as a training script does, and says where its
seconds went.

``startup_process VARIANT RANK RANKS MILLIONS FOLDER``; the result is ``FOLDER/<rank>.json``.
Nothing is imported here before it is timed, so this module needs Python's own library alone.
"""

from __future__ import annotations

import builtins
import importlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

INITIALIZE = "initialize: the rest"
IMPORTS = "initialize: imports"
"""Modules that are imported after `import deepspeed`, most of them when the first engine needs
them."""
PHASES = (
    "import torch",
    "import DeepSpeed",
    "import deepspeed_ext",
    "init_distributed",
    "operators",
    IMPORTS,
    "check of DeepSpeed's members",
    INITIALIZE,
    "model: dtype and broadcast",
    "core plan",
    "ZeRO optimizer: the rest",
    "flattening",
    "optimizer state",
    "optimizer process",
    "first step",
)
"""In the order of the table. Upstream's ZenFlow starts its process at its first update, ours in
`initialize`."""
OUTSIDE = PHASES[:4]
"""What comes before `deepspeed.initialize`; "operators" may be loaded before it or within."""


class Spans:
    """Seconds by phase, each without those of the phases inside of it."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._inner: list[float] = []
        self._importing = False

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Add the block to the phase `name`."""
        self._inner.append(0.0)
        begin = time.perf_counter()
        try:
            yield
        finally:
            took = time.perf_counter() - begin
            self.seconds[name] = self.seconds.get(name, 0.0) + took - self._inner.pop()
            if self._inner:
                self._inner[-1] += took

    def around(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        """`original`, whose calls are added to the phase `name`."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            with self.span(name):
                return original(*args, **kwargs)

        return timed

    def around_import(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """`original`, which imports modules, without the imports within imports."""

        def timed(name: str, *args: Any, **kwargs: Any) -> Any:
            if self._importing or name in sys.modules:
                return original(name, *args, **kwargs)
            self._importing = True
            try:
                with self.span(IMPORTS):
                    return original(name, *args, **kwargs)
            finally:
                self._importing = False

        return timed

    @contextmanager
    def timing(self, watched: list[tuple[Any, str, str]]) -> Iterator[None]:
        """Time the functions ``owner.attribute -> phase`` inside the block."""
        with ExitStack() as stack:
            for owner, attribute in ((builtins, "__import__"), (importlib, "import_module")):
                timed = self.around_import(getattr(owner, attribute))
                stack.enter_context(patch.object(owner, attribute, timed))
            for owner, attribute, name in watched:
                timed = self.around(name, getattr(owner, attribute))
                bound = isinstance(vars(owner).get(attribute), classmethod)
                stack.enter_context(
                    patch.object(owner, attribute, staticmethod(timed) if bound else timed)
                )
            yield


def watched() -> list[tuple[Any, str, str]]:
    """The functions of DeepSpeed and ours that are phases."""
    from deepspeed import DeepSpeedEngine
    from deepspeed.ops.op_builder.builder import OpBuilder
    from deepspeed.runtime.zenflow import zenflow_stage_1_and_2 as upstreams_zenflow
    from deepspeed.runtime.zenflow import zenflow_utils
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    from deepspeed_ext.adapter import upstream, zenflow_parts
    from deepspeed_ext.adapter.stage_1_and_2 import ZeroOptimizer
    from deepspeed_ext.cores.binding import CoreBinding
    from tests.perf import sides

    return [
        (OpBuilder, "load", "operators"),
        (sides, "initialize", INITIALIZE),
        (upstream, "check", "check of DeepSpeed's members"),
        (DeepSpeedEngine, "_configure_distributed_model", "model: dtype and broadcast"),
        (CoreBinding, "start", "core plan"),
        (zenflow_utils, "_compute_zf_pt_affinity", "core plan"),
        (DeepSpeedEngine, "_configure_zero_optimizer", "ZeRO optimizer: the rest"),
        (DeepSpeedZeroOptimizer, "flatten_dense_tensors_aligned", "flattening"),
        (ZeroOptimizer, "_flatten_together", "flattening"),
        (DeepSpeedZeroOptimizer, "initialize_optimizer_states", "optimizer state"),
        (zenflow_parts.ZenFlowParts, "start", "optimizer process"),
        (upstreams_zenflow, "start_optimizer_process", "optimizer process"),
    ]


def start(variant: str, rank: int, ranks: int, millions: float, folder: Path) -> Spans:
    """Start as `variant` does, to the end of the first step."""
    spans = Spans()
    with spans.span("import torch"):
        import torch
    with spans.span("import DeepSpeed"):
        import deepspeed
    ours = variant.startswith("ours")
    with spans.span("import deepspeed_ext") if ours else ExitStack():
        import deepspeed_ext.adapter.engine  # noqa: F401 - what `initialize` would import
    from tests.perf import sides
    from tests.perf.startup_breakdown import variants
    from tests.perf.stepping import Linears

    side, fields = variants()[variant]
    with spans.timing(watched()):
        with spans.span("init_distributed"):
            where = {
                "init_method": f"file://{folder}/rendezvous",
                "rank": rank,
                "world_size": ranks,
            }
            deepspeed.init_distributed("gloo", auto_mpi_discovery=False, **where)
        model, rows = Linears(millions), torch.randn(4, 1024, dtype=torch.bfloat16)
        settings = {"stage": 2, "micro_batch": 1, "lr": 1e-4, "weight_decay": 0.1, **fields}
        with sides.engine_of(side, model, **settings) as engine:
            with spans.span("first step"):
                engine.backward(engine(rows))
                engine.step()
            torch.distributed.barrier()
    return spans


def main() -> None:
    variant, rank, ranks, millions, folder = sys.argv[1:]
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    spans = start(variant, int(rank), int(ranks), float(millions), Path(folder))
    Path(folder, f"{rank}.json").write_text(json.dumps(spans.seconds))
    sys.stdout.flush()
    os._exit(0)  # leave no time to a process group that waits for its peers


if __name__ == "__main__":
    main()
