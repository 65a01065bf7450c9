"""Subclasses of DeepSpeed's ZeRO optimizers; the work is done by the rooms below."""
