"""Assigns disjoint CPU cores to each rank's PyTorch threads and optimizer process.

`topology` and `allowed` read facts from a directory tree. `fair_shares`, `placement` and `plan`
compute a plan from these facts, without torch, DeepSpeed or system calls. In `exchange` the ranks
agree on the plan. `thread_masks`, `openmp` and `worker_placement` bind threads; `process_threads`
binds those of this process on behalf of all its engines. `binding` holds the object that an engine
uses.

Importing this package imports nothing else, so recording the initial mask is cheap.
"""
