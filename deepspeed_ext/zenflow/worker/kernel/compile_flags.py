"""Compiler flags of the native kernel. Imports nothing: setup.py executes this file."""

# No -ffast-math: results must equal the reference's, up to rounding.
# No -march: the library must load on every CPU of the machine's architecture, and picks
# instructions when it is loaded.
COMPILE_FLAGS = ("-O3", "-std=c++17", "-fPIC", "-pthread", "-fno-math-errno", "-fno-trapping-math")
