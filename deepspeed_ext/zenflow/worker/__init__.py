"""The optimizer process: shared memory, messages and both ends of the connection. The worker's end
imports torch only without the native kernel."""
