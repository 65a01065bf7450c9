"""Builds the flat buffers of ZeRO-1/2 at start-up, where the memory suffices: accelerator, all ranks, or host."""
