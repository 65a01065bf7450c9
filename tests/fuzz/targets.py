"""All targets. A new one is added here, and both the unit suite and `make fuzz` run it."""

from deepspeed_ext.checkpoint.zenflow_state import read_saved_state
from tests.fuzz import (
    command_line,
    config,
    files,
    launch,
    model_file,
    sections,
    training,
    trees,
)
from tests.fuzz.target import Target

SECTIONS = sections.target(lambda section: read_saved_state(section, sections.NUMELS))
TARGETS: tuple[Target, ...] = (
    config.TARGET,
    files.TARGET,
    command_line.TARGET,
    trees.TARGET,
    model_file.TARGET,
    SECTIONS,
    launch.TARGET,
    training.TARGET,
)
