"""Adds the measurements of our optimizers to the logs of the Hugging Face ``Trainer``.

    deepspeed_ext.enable()  # before TrainingArguments, which reads the config
    trainer = Trainer(args=TrainingArguments(deepspeed="configs/hf.json", ...), ...)
    log_measurements(trainer)
    trainer.train()

Each value appears as ``dsext/NAME`` in ``trainer.state.log_history`` and in every reporter
(TensorBoard, W&B, ...). Needs ``pip install 'deepspeed-ext[transformers]'``.
"""

from typing import Any

from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from deepspeed_ext.runtime.log import warn_once

__all__ = ["MeasurementsCallback", "log_measurements"]

PREFIX = "dsext/"


def log_measurements(trainer: Trainer) -> None:
    """Add the optimizer's measurements to every log of `trainer`.

    The callback is inserted before those of the reporters, which otherwise would not see the
    values.
    """
    trainer.callback_handler.callbacks.insert(0, MeasurementsCallback())


class MeasurementsCallback(TrainerCallback):
    """Adds the optimizer's ``measurements()`` to a log, except values that have not changed since
    the last log.

    If the optimizer is not one of ours, it says so in the log of rank 0, once, and adds nothing.
    """

    def __init__(self) -> None:
        self._logged: dict[str, float] = {}

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        optimizer: Any = None,
        **kwargs: Any,
    ) -> None:
        measured = _measurements(optimizer)
        if measured is None and optimizer is not None and state.is_world_process_zero:
            warn_once(
                "log_measurements adds nothing: this run's optimizer is not one of deepspeed_ext. "
                "Call deepspeed_ext.enable() before TrainingArguments, and give them a DeepSpeed "
                "config with ZeRO stage 1 or 2, or stage 3 with ZenFlow"
            )
        values = {PREFIX + name: value for name, value in (measured or {}).items()}
        changed = {name: value for name, value in values.items() if self._logged.get(name) != value}
        self._logged.update(changed)
        if logs is not None:
            logs.update(changed)
        if state.log_history:  # the Trainer appends a copy of `logs` before it calls
            state.log_history[-1].update(changed)


def _measurements(optimizer: Any) -> dict[str, float] | None:
    """Return the measurements of the optimizer inside Accelerate's wrappers; None if it has
    none."""
    while optimizer is not None:
        if hasattr(optimizer, "measurements"):
            found: dict[str, float] = optimizer.measurements()
            return found
        optimizer = getattr(optimizer, "optimizer", None)
    return None
