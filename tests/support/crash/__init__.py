"""Kills a process at its k-th system call that changes files."""
