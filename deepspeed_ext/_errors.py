"""Every error that deepspeed_ext raises on purpose.

DeepSpeedExtError
 +-- ConfigError (also ValueError)    a setting that cannot work; names field, value and remedy
 +-- UnsupportedError                 this machine, platform or DeepSpeed version cannot do what was asked
 |    +-- UpstreamError               the installed DeepSpeed is not the one this package knows
 +-- PlanMismatchError                the ranks disagree about what to do next; prints the plans that differ
 +-- OutOfMemoryError                 no way of doing it fits; nothing was lost
 +-- CheckpointError                  a checkpoint that cannot be read here; names file and reason
 +-- WorkerError                      the optimizer process died, failed or does not answer
 +-- RankError                        something else failed on a rank; raised on all of them

A message says what was expected, what came, where (rank, field, parameter) and what to change.
"""

__all__ = [
    "CheckpointError",
    "ConfigError",
    "DeepSpeedExtError",
    "OutOfMemoryError",
    "PlanMismatchError",
    "RankError",
    "UnsupportedError",
    "UpstreamError",
    "WorkerError",
]


class DeepSpeedExtError(Exception):
    """Base of every error raised by deepspeed_ext.

    Attributes:
        agreed: whether every rank has raised it, so that nobody has to be told.
    """

    agreed = False


class ConfigError(DeepSpeedExtError, ValueError):
    """A setting that cannot work."""


class UnsupportedError(DeepSpeedExtError, RuntimeError):
    """This machine, platform or library version cannot do what was asked."""


class UpstreamError(UnsupportedError):
    """The installed DeepSpeed lacks a name or signature that deepspeed_ext builds on."""


class PlanMismatchError(DeepSpeedExtError, RuntimeError):
    """The ranks hold different plans for the same step."""


class OutOfMemoryError(DeepSpeedExtError, RuntimeError):
    """No way of doing it fits into memory."""


class CheckpointError(DeepSpeedExtError, RuntimeError):
    """A checkpoint that cannot be read, or not here."""


class WorkerError(DeepSpeedExtError, RuntimeError):
    """The optimizer process died, failed or does not answer."""


class RankError(DeepSpeedExtError, RuntimeError):
    """An error that is none of the above, of one or more ranks; the message names them."""
