"""The optimizers that ZenFlow can run: what each of them keeps, steps and estimates. `choose` finds
the user's."""
