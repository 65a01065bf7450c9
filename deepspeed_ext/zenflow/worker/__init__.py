"""The optimizer process: shared memory, messages, both ends of the connection. The worker's end imports no torch."""
