"""Random programs of calls on an engine, beside stock DeepSpeed: ``python -m tests.fuzz.usage``."""
