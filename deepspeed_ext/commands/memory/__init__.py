"""Computes the memory of a run before it starts, by kind and phase."""
