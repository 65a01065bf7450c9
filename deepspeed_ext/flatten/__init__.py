"""Builds the flat buffers of ZeRO-1/2 at start-up: on the accelerator, from slices of all ranks, or
on the host."""
