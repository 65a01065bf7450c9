"""Trains for long, with faults at random times and a resume after each: `python -m tests.soak.run
--help`."""
