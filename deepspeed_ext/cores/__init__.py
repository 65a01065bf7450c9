"""Assigns disjoint CPU cores to each rank's PyTorch threads and optimizer process.

`topology` and `allowed` read facts from a directory tree. `fair_shares`, `placement` and `plan` compute a plan from
these facts, without torch, DeepSpeed or system calls. In `exchange` the ranks agree on the plan. `thread_masks`,
`openmp` and `worker_placement` bind real threads, and `process_threads` those of this process for all its engines.
`binding` is the object that an engine holds.

Importing this package imports nothing else, so recording the initial mask is cheap.
"""
