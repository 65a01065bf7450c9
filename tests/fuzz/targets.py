"""All targets. A new one is added here, and both the unit suite and `make fuzz` run it."""

from tests.fuzz import command_line, config, trees, tuning
from tests.fuzz.target import Target

TARGETS: tuple[Target, ...] = (config.TARGET, command_line.TARGET, trees.TARGET, tuning.TARGET)
