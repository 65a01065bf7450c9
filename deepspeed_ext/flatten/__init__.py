"""Tiered flattening of parameter groups at the start-up of ZeRO-1/2."""
