"""All targets. A new one is added here, and both the unit suite and `make fuzz` run it."""

from deepspeed_ext.checkpoint.zenflow_state import read_saved_state
from tests.fuzz import config, files, sections
from tests.fuzz.target import Target

SECTIONS = sections.target(lambda section: read_saved_state(section, sections.NUMELS))
TARGETS: tuple[Target, ...] = (config.TARGET, files.TARGET, SECTIONS)
