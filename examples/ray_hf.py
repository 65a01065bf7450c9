"""The Trainer with ZenFlow on workers of Ray Train, which resume after a failure: python
examples/ray_hf.py"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray
from ray.train import FailureConfig, Result, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer

EXAMPLES = Path(__file__).resolve().parent


def work(config: dict[str, Any]) -> None:
    """One worker. Ray has started the process group and set RANK and its siblings."""
    sys.path.insert(0, config.pop("examples"))
    import trl_sft
    from transformers.trainer_utils import get_last_checkpoint

    output = Path(config.pop("output"))
    resume = output.is_dir() and get_last_checkpoint(str(output)) is not None
    trl_sft.train(output, resume=resume, **config)


def fit(
    output: Path,
    workers: int = 2,
    gpus: bool = False,
    work: Callable[..., None] = work,
    **changes: Any,
) -> Result:
    """Train in `output`, a folder that all workers share; a failed worker starts all of them
    again."""
    trainer = TorchTrainer(
        work,
        train_loop_config={"examples": str(EXAMPLES), "output": str(output), **changes},
        scaling_config=ScalingConfig(num_workers=workers, use_gpu=gpus),
        torch_config=TorchConfig(backend="nccl" if gpus else "gloo"),
        run_config=RunConfig(
            storage_path=str(output / "ray"), failure_config=FailureConfig(max_failures=3)
        ),
    )
    return trainer.fit()


if __name__ == "__main__":
    ray.init(include_dashboard=False)
    fit(EXAMPLES.parent / "outputs" / "ray_hf", gpus="--gpus" in sys.argv)
