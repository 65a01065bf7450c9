"""Checkpoint files of all ranks: one complete save or none, also while training continues and after
a crash."""
