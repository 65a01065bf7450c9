"""Who runs on which CPU core: PyTorch's threads apart from the optimizer's, every rank apart from every other.

Facts (`topology`, `cgroup`, `allowed`) are read from a directory tree and planned over (`share`, `place`, `plan`)
without torch, DeepSpeed or any system call; `exchange` lets the ranks agree; `apply` and `worker` bind real threads;
`binding` is the object that an engine holds; `tune` measures how many cores the optimizer needs.

Importing this package imports nothing else, so that the first affinity snapshot is cheap.
"""
