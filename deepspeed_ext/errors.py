"""All errors that deepspeed_ext raises on purpose.

DeepSpeedExtError
 +-- ConfigError (also ValueError)    a setting that cannot work; gives field, value and remedy
 +-- UnsupportedError                 this machine, platform or DeepSpeed version lacks a feature
 |    +-- UpstreamError               the installed DeepSpeed is not a supported one
 +-- PlanMismatchError                the ranks have different plans; gives each of them
 +-- OutOfMemoryError                 too little memory; no data was lost
 +-- CheckpointError                  a checkpoint that cannot be read; gives file and reason
 +-- WorkerError                      the optimizer process died, failed or does not answer
 +-- StateError                       the engine is not ready for a call; gives the missing call
 +-- RankError                        another failure on any rank; raised on every rank

A message says what was expected, what was found, where (rank, field, parameter) and what to change.
"""


class DeepSpeedExtError(Exception):
    """Base of every error raised by deepspeed_ext.

    Attributes:
        agreed: number of ranks that raise it together and need not exchange it again; 0: only this
            rank raises it.
    """

    agreed = 0


class ConfigError(DeepSpeedExtError, ValueError):
    """A setting that cannot work."""


class UnsupportedError(DeepSpeedExtError, RuntimeError):
    """This machine, platform or library version lacks a feature that is needed."""


class UpstreamError(UnsupportedError):
    """The installed DeepSpeed is not a supported version, or lacks a member that deepspeed_ext
    relies on."""


class PlanMismatchError(DeepSpeedExtError, RuntimeError):
    """The ranks have different plans for the same task."""


class OutOfMemoryError(DeepSpeedExtError, RuntimeError):
    """A task does not fit into memory."""


class StateError(DeepSpeedExtError, RuntimeError):
    """A call for which the engine is not ready, because another call is missing."""


class CheckpointError(DeepSpeedExtError, RuntimeError):
    """A checkpoint that cannot be read, or not with this configuration."""


class WorkerError(DeepSpeedExtError, RuntimeError):
    """The optimizer process died, failed or does not answer."""


class RankError(DeepSpeedExtError, RuntimeError):
    """Any other error on one or more ranks; the message names the ranks."""
