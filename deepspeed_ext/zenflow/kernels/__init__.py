"""The elementwise arithmetic of a step on the accelerator: one Triton kernel for each of its parts.

`zenflow.worker.kernel.definition` defines what they compute, in torch operations. `device` holds
the Triton kernels and is imported only if Triton is installed. `launch` chooses, and compiles
before a step needs them. The worker's pass over host memory is in `zenflow.worker.kernel`.
"""
