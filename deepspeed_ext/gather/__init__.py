"""All-gathers single parameters in ZeRO-3: `plan` decides, `launch` communicates, `all_gather` serves a model."""
