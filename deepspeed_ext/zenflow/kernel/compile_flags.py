"""Compiler flags of the native kernel, for setup.py and for compilation on first use. Imports nothing: setup.py
executes this file."""

# No -ffast-math: results must equal the reference's, up to rounding.
COMPILE_FLAGS = ("-O3", "-fopenmp", "-std=c++17", "-fPIC", "-fno-math-errno", "-fno-trapping-math")
