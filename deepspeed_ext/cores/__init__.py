"""Assigns disjoint CPU cores to each rank's PyTorch threads and optimizer process.

`topology` reads facts from a directory tree. `plan` and `placement` compute a plan from these
facts, without torch, DeepSpeed or system calls. In `exchange` the ranks agree on the plan.
`threads` sets masks; `binding` holds the object that an engine uses. `report` serves commands, and
`initial_mask` runs before torch is imported.

Importing this package imports nothing else, so recording the initial mask is cheap.
"""
