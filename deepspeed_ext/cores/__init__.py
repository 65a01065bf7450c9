"""Assigns disjoint CPU cores to each rank's PyTorch threads and optimizer process.

`topology` reads facts from a directory tree, and `plan` computes a plan from them, without torch,
DeepSpeed or system calls. `threads` sets masks; `binding` agrees on the plan among ranks and holds
the object that an engine uses. `report` serves commands, and `initial_mask` runs before torch is
imported.

Importing this package imports nothing else, so recording the initial mask is cheap.
"""
