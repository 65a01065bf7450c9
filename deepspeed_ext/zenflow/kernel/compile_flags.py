"""How the native kernel is compiled, by setup.py and on first use. Imports nothing: setup.py runs this file."""

# No -ffast-math: results must be those of the reference, to rounding.
COMPILE_FLAGS = ("-O3", "-fopenmp", "-std=c++17", "-fPIC", "-fno-math-errno", "-fno-trapping-math")
