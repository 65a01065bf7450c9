"""All targets. A new one is added here, and both the unit suite and `make fuzz` run it."""

from tests.fuzz import config, files
from tests.fuzz.target import Target

TARGETS: tuple[Target, ...] = (config.TARGET, files.TARGET)
