"""CPU Adam: torch's fused AdamW, DeepSpeedCPUAdam and the worker's whole pass, in turn on the same cores.

    python tests/perf/bench_cpu_adam.py [--numel 67108864] [--threads 2] [--repeats 15] [--json out.json]

"fused" is plain ``torch.optim.AdamW(fused=True)``: fp32 gradient in, nothing out. The pass reads a 16-bit gradient and
writes a 16-bit weight and the block means besides; "interval 4" carries out four steps in one pass, per step.
"""

import argparse
import json
import mmap
import os
import platform
import statistics
import time
from collections.abc import Callable

import torch

from deepspeed_ext.zenflow.kernel import AdamPass, AdamStep, Array, Kernel, Publish, library_path, load_kernel

INTERVAL = 4


def _memfd_tensor(numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Memory as the worker has it: a shared mapping of a memfd."""
    descriptor = os.memfd_create("bench")
    nbytes = numel * dtype.itemsize
    os.ftruncate(descriptor, nbytes)
    return torch.frombuffer(mmap.mmap(descriptor, nbytes), dtype=dtype).zero_()


def _array(tensor: torch.Tensor) -> Array:
    return Array(tensor.data_ptr(), str(tensor.dtype).removeprefix("torch."), tensor.numel())


def _pass_runner(kernel: Kernel, numel: int, steps: int, memory: Callable[..., torch.Tensor]) -> Callable[[], None]:
    p, m, v = (memory(numel, torch.float32) for _ in range(3))
    published, means = memory(numel, torch.bfloat16), memory(-(-numel // 32), torch.float32)
    grads = [memory(numel, torch.bfloat16).normal_() for _ in range(steps)]
    v.fill_(1e-2)
    adam = [AdamStep(1e-3, 0.9, 0.95, 1e-8, 0.1, True, 100 + k, 0.5) for k in range(steps)]
    adam_pass = AdamPass(
        _array(p),
        _array(m),
        _array(v),
        grads=tuple(map(_array, grads)),
        steps=tuple(adam),
        published=_array(published),
        block_means=_array(means),
        block_size=32,
        publish=Publish(0.99, 1e-3, 0.0, 0.0, adam[-1].bias_correction2_sqrt, 1e-8),
    )
    keep = (p, m, v, published, means, grads)

    def run() -> None:
        assert keep
        kernel.run(adam_pass)

    return run


def _fused_runner(numel: int) -> Callable[[], None]:
    parameter = torch.zeros(numel, requires_grad=True)
    parameter.grad = torch.randn(numel)
    optimizer = torch.optim.AdamW([parameter], lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    return lambda: optimizer.step() and None


def _deepspeed_runner(numel: int) -> Callable[[], None] | None:
    try:
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        parameter = torch.zeros(numel, requires_grad=True)
        parameter.grad = torch.randn(numel)
        optimizer = DeepSpeedCPUAdam([parameter], lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
    except Exception as error:  # its kernel is compiled on first use: many things can be missing
        print(f"DeepSpeedCPUAdam does not run here: {error}")
        return None
    return lambda: optimizer.step() and None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--numel", type=int, default=64 * 1024**2)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--deepspeed", action="store_true", help="also DeepSpeedCPUAdam (compiles its kernel)")
    parser.add_argument("--json")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)

    library = library_path()
    native = load_kernel(library, options.threads)
    reference = load_kernel(None, options.threads)

    def zeros(numel: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(numel, dtype=dtype)

    contenders: dict[str, tuple[Callable[[], None], int]] = {
        "torch fused AdamW": (_fused_runner(options.numel), 1),
        f"whole pass, {native.name}": (_pass_runner(native, options.numel, 1, _memfd_tensor), 1),
        f"whole pass, {native.name}, private memory": (_pass_runner(native, options.numel, 1, zeros), 1),
        f"whole pass, {native.name}, interval {INTERVAL}": (
            _pass_runner(native, options.numel, INTERVAL, _memfd_tensor),
            INTERVAL,
        ),
        "whole pass, reference": (_pass_runner(reference, options.numel, 1, _memfd_tensor), 1),
    }
    deepspeed_runner = _deepspeed_runner(options.numel) if options.deepspeed else None
    if deepspeed_runner is not None:
        contenders["DeepSpeedCPUAdam"] = (deepspeed_runner, 1)

    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for repeat in range(options.repeats + 1):
        for name, (run, steps) in contenders.items():
            begin = time.perf_counter()
            run()
            if repeat:  # the first round touches the memory
                seconds[name].append((time.perf_counter() - begin) / steps)

    base = statistics.median(seconds["torch fused AdamW"])
    print(f"{options.numel} elements, {options.threads} threads, torch {torch.__version__}, {platform.processor()}")
    print(f"{'':44s} median ms a step   p90 ms   ratio to fused")
    for name, values in seconds.items():
        values.sort()
        median = statistics.median(values)
        print(f"{name:44s} {median * 1e3:17.1f} {values[int(len(values) * 0.9)] * 1e3:8.1f} {median / base:16.2f}")
    if options.json:
        with open(options.json, "w") as file:
            result = {"torch": torch.__version__, "machine": platform.platform(), "options": vars(options)}
            json.dump({**result, "seconds": seconds}, file, indent=1)


if __name__ == "__main__":
    main()
