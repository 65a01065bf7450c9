"""Tests, benchmarks and what they share. They compare with stock DeepSpeed, which nothing may
extend unasked."""

import os

os.environ.pop("DSEXT_AUTOLOAD", None)
