"""An Axolotl plugin that enables the extension and logs its measurements. Add it to the run's YAML:

    plugins:
      - deepspeed_ext.integrations.axolotl.DeepSpeedExtPlugin

The DeepSpeed config that ``deepspeed:`` names may then have our fields.
"""

from typing import Any

from axolotl.integrations.base import BasePlugin

import deepspeed_ext
from deepspeed_ext.integrations.transformers import log_measurements

__all__ = ["DeepSpeedExtPlugin"]


class DeepSpeedExtPlugin(BasePlugin):
    """Enables the extension before Axolotl reads the DeepSpeed config, and adds our measurements to
    the logs."""

    def register(self, cfg: Any) -> None:
        """Enable the extension; Axolotl calls this when it has read the YAML."""
        deepspeed_ext.enable()

    def post_trainer_create(self, cfg: Any, trainer: Any) -> None:
        """Add ``dsext/NAME`` to the logs of `trainer`."""
        log_measurements(trainer)
