"""Checkpoint files of all ranks: one complete save or none, also beside training and after a
crash."""
