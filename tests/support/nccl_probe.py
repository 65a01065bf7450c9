"""Do several NCCL ranks run on one device here? Torch alone is needed, and at most the seconds that
are given.

    python -m tests.support.nccl_probe [--ranks 2 3] [--seconds 40] [--device cpu|accelerator]

NCCL refuses two ranks on one device by comparing a hash of the host and the device's address. The
environment of `environment` gives each rank a host of its own, so that they talk through sockets
over loopback: NCCL's own kernels, streams, order and aborts, and no speed that means anything.
NVIDIA calls that unsupported. So a case that hangs says nothing of the package, and one that passes
is evidence. ``--device cpu`` tries the probe itself with gloo.

Prints a line for each case and, last, all verdicts as JSON. Exit status 1: a case failed with one
of the numbers of ranks.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist

__all__ = ["CASES", "Probed", "environment", "probe"]

NUMEL = 1 << 20
SECONDS = 40.0
ROOT = Path(__file__).resolve().parents[2]


def environment(rank: int) -> dict[str, str]:
    """What a rank's environment must hold before it makes its process group, to share a device with
    others."""
    return {
        "NCCL_HOSTID": f"rank{rank}",
        "NCCL_SOCKET_IFNAME": "lo",
        "NCCL_IB_DISABLE": "1",
        "NCCL_P2P_DISABLE": "1",
        "NCCL_SHM_DISABLE": "1",
        "NCCL_MULTI_RANK_GPU_ENABLE": "1",
    }


# -- the cases ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Peers:
    """This rank among the others.

    Attributes:
        other: a second group of all ranks.
        mine: 1-D fp32 of `NUMEL` elements, all of them this rank's number plus one.
        everyone: `mine` of all ranks, one after the other.
    """

    rank: int
    ranks: int
    device: torch.device
    other: dist.ProcessGroup
    mine: torch.Tensor
    everyone: torch.Tensor

    @property
    def total(self) -> float:
        """Of an element of `mine` over all ranks."""
        return self.ranks * (self.ranks + 1) / 2

    @property
    def stream(self) -> torch.Stream:
        return torch.accelerator.current_stream(self.device)


def _all_reduce(peers: Peers) -> bool:
    values = peers.mine.clone()
    dist.all_reduce(values)
    return bool((values == peers.total).all())


def _minimum(peers: Peers) -> bool:
    values = peers.mine.clone()
    dist.all_reduce(values, dist.ReduceOp.MIN)
    return bool((values == 1).all())


def _all_gather(peers: Peers) -> bool:
    values = torch.empty_like(peers.everyone)
    dist.all_gather_into_tensor(values, peers.mine)
    return torch.equal(values, peers.everyone)


def _all_gather_in_place(peers: Peers) -> bool:
    values = torch.zeros_like(peers.everyone)
    own = values[peers.rank * NUMEL : (peers.rank + 1) * NUMEL]
    own.copy_(peers.mine)
    dist.all_gather_into_tensor(values, own)
    return torch.equal(values, peers.everyone)


def _reduce_scatter(peers: Peers) -> bool:
    values = torch.empty_like(peers.mine)
    dist.reduce_scatter_tensor(values, peers.everyone.clone())
    return bool((values == peers.ranks * (peers.rank + 1)).all())


def _broadcast(peers: Peers) -> bool:
    values = peers.mine.clone()
    dist.broadcast(values, 0)
    return bool((values == 1).all())


def _coalesced_gather(peers: Peers) -> bool:
    """Several all-gathers of bytes in one launch, as those of single parameters are."""
    targets = [
        torch.empty(peers.ranks * numel, device=peers.device, dtype=torch.uint8)
        for numel in (64, 4096, 1 << 18)
    ]
    own = [torch.full_like(each[: each.numel() // peers.ranks], peers.rank) for each in targets]
    with dist._coalescing_manager(group=peers.other, device=peers.device, async_ops=True) as work:
        for target, part in zip(targets, own, strict=True):
            dist.all_gather_into_tensor(target, part, group=peers.other)
    work.wait()
    expected = torch.arange(peers.ranks, device=peers.device).view(-1, 1)
    return all(bool((each.view(peers.ranks, -1) == expected).all()) for each in targets)


def _exchange(peers: Peers) -> bool:
    """Each sends to the next rank and receives from the one before, in one launch."""
    values = torch.empty_like(peers.mine)
    there, here = (peers.rank + 1) % peers.ranks, (peers.rank - 1) % peers.ranks
    sent = dist.P2POp(dist.isend, peers.mine, there)
    for work in dist.batch_isend_irecv([sent, dist.P2POp(dist.irecv, values, here)]):
        work.wait()
    return bool((values == here + 1).all())


def _two_groups(peers: Peers) -> bool:
    first, second = peers.mine.clone(), peers.mine.clone()
    works = [dist.all_reduce(first, async_op=True)]
    works.append(dist.all_reduce(second, group=peers.other, async_op=True))
    for work in works:
        work.wait()
    return torch.equal(first, second)


def _two_streams(peers: Peers) -> bool:
    side, values = torch.Stream(device=peers.device), peers.mine.clone()
    side.wait_stream(peers.stream)
    with side:
        for _ in range(20):
            values = values + 1 - 1
        dist.all_reduce(values, group=peers.other)
    peers.stream.wait_stream(side)
    return bool((values == peers.total).all())


def _barrier(peers: Peers) -> bool:
    dist.barrier()
    return True


CASES: dict[str, Callable[[Peers], bool]] = {
    "all_reduce": _all_reduce,
    "all_reduce, minimum": _minimum,
    "all_gather_into_tensor": _all_gather,
    "all_gather_into_tensor, in place": _all_gather_in_place,
    "reduce_scatter_tensor": _reduce_scatter,
    "broadcast": _broadcast,
    "all_gather_into_tensor, coalesced": _coalesced_gather,
    "isend and irecv, in one launch": _exchange,
    "all_reduce in two groups at once": _two_groups,
    "all_reduce on two streams": _two_streams,
    "barrier": _barrier,
}
ON_DEVICES_ONLY = ("all_gather_into_tensor, coalesced", "all_reduce on two streams")


def cases(device: str) -> list[str]:
    """What is tried there."""
    return [name for name in CASES if device != "cpu" or name not in ON_DEVICES_ONLY]


def _be_a_rank(rank: int, ranks: int, store: str, device: str) -> None:
    """Try every case; rank 0 prints a line for each as soon as it is known."""
    where = torch.device("cpu")
    if device != "cpu":
        accelerator = torch.accelerator.current_accelerator()
        assert accelerator is not None
        where = torch.device(accelerator.type, 0)
        torch.accelerator.set_device_index(0)
    backend = "gloo" if device == "cpu" else "nccl"
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=ranks)
    numbers = torch.arange(1, ranks + 1, dtype=torch.float32, device=where)
    mine = torch.full((NUMEL,), rank + 1.0, device=where)
    peers = Peers(
        rank,
        ranks,
        where,
        dist.new_group(list(range(ranks))),
        mine,
        numbers.repeat_interleave(NUMEL),
    )
    for name in cases(device):
        begin = time.perf_counter()
        try:
            found = "ok" if CASES[name](peers) else "wrong values"
            if device != "cpu":
                torch.accelerator.synchronize()
        except Exception as error:
            found = f"{type(error).__name__}: {str(error).splitlines()[0][:160]}"
        if rank == 0:
            took = 1e3 * (time.perf_counter() - begin)
            _say(json.dumps({"case": name, "found": found, "ms": took}))
    os._exit(0)  # what follows would wait for the peers


# -- their verdict --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Probed:
    """What became of the cases with a number of ranks.

    Attributes:
        passed: milliseconds by case.
        failed: what was found instead, by case; of those that had not ended, that they had not.
        seconds: of all.
    """

    ranks: int
    passed: dict[str, float]
    failed: dict[str, str]
    seconds: float

    @property
    def says(self) -> str:
        """In a line."""
        if not self.failed:
            return (
                f"{len(self.passed)} of {len(self.passed)} "
                f"collectives passed in {self.seconds:.0f} s"
            )
        return "; ".join(f"{case}: {what}" for case, what in self.failed.items())


def probe(ranks: int, seconds: float = SECONDS, device: str = "accelerator") -> Probed:
    """Try all cases with `ranks` processes on device 0; all of them are ended after `seconds`."""
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="dsext-probe-") as folder, ExitStack() as stack:
        out = stack.enter_context(open(Path(folder, "out"), "w+b"))
        log = stack.enter_context(open(Path(folder, "log"), "w+b"))
        processes = []
        for rank in range(ranks):
            words = ["--rank", str(rank), "--ranks", str(ranks), "--device", device]
            command = [
                sys.executable,
                "-m",
                "tests.support.nccl_probe",
                *words,
                "--store",
                f"{folder}/store",
            ]
            settings, told = os.environ | environment(rank), out if rank == 0 else log
            processes.append(
                subprocess.Popen(command, cwd=ROOT, env=settings, stdout=told, stderr=log)
            )
            stack.callback(processes[-1].wait)
            stack.callback(processes[-1].kill)
        while time.monotonic() - begin < seconds and any(each.poll() is None for each in processes):
            if any(each.poll() for each in processes):  # the others would wait for it
                break
            time.sleep(0.05)
        hung = all(not each.poll() for each in processes)
        out.seek(0)
        log.seek(0)
        lines = [
            json.loads(line) for line in out.read().decode().splitlines() if line.startswith("{")
        ]
        words = log.read().decode(errors="replace").strip().splitlines()
    passed = {line["case"]: line["ms"] for line in lines if line["found"] == "ok"}
    failed = {line["case"]: line["found"] for line in lines if line["found"] != "ok"}
    why = (
        f"had not ended after {seconds:.0f} s"
        if hung
        else f"a rank ended: {words[-1][:200] if words else ''}"
    )
    missing = [name for name in cases(device) if name not in passed and name not in failed]
    failed |= {name: why if index == 0 else "not tried" for index, name in enumerate(missing)}
    return Probed(ranks, passed, failed, time.monotonic() - begin)


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main(argv: Sequence[str] | None = None) -> int:
    """Probe, or be one of the ranks."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 3])
    parser.add_argument("--seconds", type=float, default=SECONDS, help="for each number of ranks")
    parser.add_argument("--device", choices=("cpu", "accelerator"), default="accelerator")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--store", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.rank is not None:
        _be_a_rank(args.rank, args.ranks[0], args.store, args.device)
    found = []
    for ranks in args.ranks:
        found.append(probe(ranks, args.seconds, args.device))
        for case, took in found[-1].passed.items():
            _say(f"{ranks} ranks: {case}: ok, {took:.1f} ms")
        for case, what in found[-1].failed.items():
            _say(f"{ranks} ranks: {case}: FAILED, {what}")
    _say(json.dumps([asdict(each) for each in found]))
    return int(any(each.failed for each in found))


if __name__ == "__main__":
    sys.exit(main())
