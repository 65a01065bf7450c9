"""Random mutants of the package, and which tests notice them."""
