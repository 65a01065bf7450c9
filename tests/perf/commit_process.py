"""One side of `compare_commits`: trains with whatever deepspeed_ext is first on the path, as many
steps as it is told.

Knows nothing of the repository but `deepspeed_ext.initialize`, because it runs with commits of any
age.
"""

import json
import os
import sys
import tempfile
import time
from pathlib import Path


def cpu_seconds_of_all() -> float:
    """User and system time of this process and of those that it has started, dead or alive; in
    steps of a clock tick, 10 ms."""
    ticks = {}
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            words = path.read_text().rpartition(")")[2].split()
        except OSError:  # it has ended meanwhile
            continue
        number = int(path.parent.name)
        parents[number] = int(words[1])
        ticks[number] = sum(map(int, words[11:15]))  # its own, and of children that have ended
    ours = {os.getpid()}
    while more := {each for each, parent in parents.items() if parent in ours} - ours:
        ours |= more
    return sum(ticks[each] for each in ours) / os.sysconf("SC_CLK_TCK")


_calls = 0


def _count(frame: object, event: str, argument: object) -> None:
    global _calls
    _calls += event == "call"


def calls() -> float:
    """A thousandth of the calls of Python functions that this thread has made: a clock that no
    other work changes."""
    sys.setprofile(_count)
    return _calls / 1e3


CLOCKS = {
    "wall": time.perf_counter,
    "thread": time.thread_time,
    "all": cpu_seconds_of_all,
    "calls": calls,
}


def main() -> None:
    """Write the milliseconds of `initialize`. Then read numbers of steps from stdin; answer each
    with the milliseconds of every `engine.step`."""
    order = json.loads(sys.argv[1])
    now = CLOCKS[order["clock"]]
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever a library prints is no answer
    import deepspeed
    import torch

    import deepspeed_ext

    torch.manual_seed(0)
    rendezvous = tempfile.mktemp(prefix="deepspeed_ext-rendezvous-")
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{rendezvous}", rank=0, world_size=1
    )
    os.environ |= {"LOCAL_RANK": "0", "RANK": "0", "WORLD_SIZE": "1"}
    deepspeed.init_distributed(dist_backend="gloo")
    width = int((order["millions"] * 1e6 / 8) ** 0.5) // 64 * 64
    model = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(8)))
    config = {
        "train_micro_batch_size_per_gpu": 8,
        "bf16": {"enabled": True},
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}},
        "zero_optimization": {
            "stage": order["stage"],
            "zenflow": order["zenflow"],
            "core_binding": {"enabled": False},
        },
    }
    begin = now()
    engine, *_ = deepspeed_ext.initialize(
        model=model, model_parameters=model.parameters(), config=config
    )
    answers.write(f"{(now() - begin) * 1e3}\n")
    batch = torch.randn(8, width).bfloat16()
    for line in sys.stdin:
        found = []
        for _ in range(int(line)):
            engine.backward(engine(batch).float().square().mean())
            begin = now()
            engine.step()
            found.append((now() - begin) * 1e3)
        answers.write(json.dumps(found) + "\n")
    engine.destroy()


if __name__ == "__main__":
    main()
