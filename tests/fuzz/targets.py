"""All targets. A new one is added here, and both the unit suite and `make fuzz` run it."""

from tests.fuzz import (
    command_line,
    config,
    files,
    launch,
    model_file,
    training,
    trees,
)
from tests.fuzz.target import Target

TARGETS: tuple[Target, ...] = (
    config.TARGET,
    files.TARGET,
    command_line.TARGET,
    trees.TARGET,
    model_file.TARGET,
    launch.TARGET,
    training.TARGET,
)
