"""The optimizers that ZenFlow can run: their state, step and estimate. `choose` finds the
user's."""
