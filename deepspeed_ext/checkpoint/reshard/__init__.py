"""Loads a checkpoint of any number of ranks and any ZeRO stage on any other."""
