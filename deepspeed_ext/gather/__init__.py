"""ZeRO-3 all-gather of single parameters: `plan` decides, `launch` communicates, `all_gather` does it for a model."""
