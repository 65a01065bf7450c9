"""Adds the measurements of our optimizers to the logs of the Hugging Face ``Trainer``.

    deepspeed_ext.enable()  # before TrainingArguments, which reads the config
    trainer = Trainer(args=TrainingArguments(deepspeed="configs/hf.json", ...), ...)
    log_measurements(trainer)
    trainer.train()

Each value appears as ``dsext/NAME`` in ``trainer.state.log_history`` and in every reporter (TensorBoard, W&B, ...).
"""

from typing import Any

try:
    import accelerate  # noqa: F401
    from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
except ImportError as error:
    raise ImportError(
        f"deepspeed_ext.integrations.transformers needs transformers and accelerate ({error}); "
        "install them with: pip install 'deepspeed-ext[transformers]'"
    ) from error

__all__ = ["MeasurementsCallback", "log_measurements"]

PREFIX = "dsext/"


def log_measurements(trainer: Trainer) -> None:
    """Add the optimizer's measurements to every log of `trainer`.

    The callback is inserted before those of the reporters, which would not see the values otherwise.
    """
    trainer.callback_handler.callbacks.insert(0, MeasurementsCallback())


class MeasurementsCallback(TrainerCallback):
    """Adds the optimizer's ``measurements()`` to a log, except values that have not changed since the last log.

    Does nothing if the optimizer is not one of ours.
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
        values = {PREFIX + name: value for name, value in _measurements(optimizer).items()}
        changed = {name: value for name, value in values.items() if self._logged.get(name) != value}
        self._logged.update(changed)
        if logs is not None:
            logs.update(changed)
        if state.log_history:  # the Trainer appends a copy of `logs` before it calls
            state.log_history[-1].update(changed)


def _measurements(optimizer: Any) -> dict[str, float]:
    """Return the measurements of the optimizer inside Accelerate's wrappers; empty if it has none."""
    while optimizer is not None:
        if hasattr(optimizer, "measurements"):
            return optimizer.measurements()
        optimizer = getattr(optimizer, "optimizer", None)
    return {}
