"""ZenFlow under trainers of other libraries: `make test-trainers`."""
