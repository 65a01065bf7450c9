"""Removes each wait of the package in turn, and shows which test on the simulated accelerator
notices."""
