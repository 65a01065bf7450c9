"""Sets the rank variables that DeepSpeed reads and the launcher has not set."""

import os
import socket

from deepspeed_ext.runtime.launcher_variables import NEEDED, RANK_VARIABLES, alone, plan_launch
from deepspeed_ext.runtime.log import logger

__all__ = ["find_rank", "set_launch_variables"]


def set_launch_variables() -> None:
    """Add the variables of srun or MPI to the environment.

    Raises:
        ConfigError: the variables contradict each other, or some cannot be determined.
    """
    plan = plan_launch(os.environ)
    os.environ.update(plan.variables)
    if plan.variables and os.environ["RANK"] == "0":
        names = ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        found = ", ".join(f"{name}={os.environ[name]}" for name in names)
        logger.info(f"{plan.launcher} started rank 0: {found}")


def find_rank() -> bool:
    """Like `set_launch_variables`. If no launcher has started this process and its rank is not set
    by hand, also make it rank 0 of 1. Return whether the rank is known now.

    Raises:
        ConfigError: as `set_launch_variables`.
    """
    set_launch_variables()
    by_hand = any(os.environ.get(name) for name in RANK_VARIABLES)
    if not by_hand and plan_launch(os.environ).launcher is None:
        os.environ.update(alone(os.environ, _free_port()))
        logger.info(
            "no launcher has started this process, so it is rank 0 of 1; to use several "
            "accelerators, start it with torchrun, deepspeed, accelerate, srun or mpirun"
        )
    return all(os.environ.get(name) for name in NEEDED)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
