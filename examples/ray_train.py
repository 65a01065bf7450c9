"""Trains as examples/train.py does, with Ray Train as the launcher.

    python examples/ray_train.py --workers 2
    python examples/ray_train.py --workers 16 --gpus --address auto --steps 1000

All other arguments are those of examples/train.py. The output folder must be the same folder for
all workers. A relative path starts in the folder where this was started, as with other launchers.
"""

import argparse
import os
import sys
from pathlib import Path
from typing import Any

import ray
from ray.train import ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer


def work(config: dict[str, Any]) -> None:
    """One worker. Ray has started the process group and set RANK and its siblings."""
    os.chdir(config["started_in"])  # Ray's own folder is a temporary one
    # for the command that continues the run, which the example prints: not the worker's own
    sys.argv, os.environ["STARTED_BY"] = config["command"], "python"
    sys.path.insert(0, config["folder"])
    import train

    args = train.parse_args(config["arguments"])
    train.share_cores()
    train.connect()
    train.run(args)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", type=int, default=2, help="ranks")
    parser.add_argument("--gpus", action="store_true", help="give each rank a GPU")
    parser.add_argument("--address", help="of a Ray cluster (default: start one on this machine)")
    args, arguments = parser.parse_known_args()
    ray.init(address=args.address, include_dashboard=False, log_to_driver=True)
    trainer = TorchTrainer(
        work,
        train_loop_config={
            "started_in": os.getcwd(),
            "folder": str(Path(__file__).resolve().parent),
            "command": sys.argv,
            "arguments": arguments,
        },
        scaling_config=ScalingConfig(num_workers=args.workers, use_gpu=args.gpus),
        torch_config=TorchConfig(backend="nccl" if args.gpus else "gloo"),
    )
    trainer.fit()
    ray.shutdown()


if __name__ == "__main__":
    main()
