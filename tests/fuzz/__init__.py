"""Fuzzing: invented configs, and programs of calls on an engine.
All can be repeated.

``python -m tests.fuzz.run --minutes 30`` (`make fuzz`) runs cases until the time is over; the unit
suite runs a fixed number of them. `targets.TARGETS` lists what is fuzzed, `target.Target` says what
a target is.
"""
