"""Many seeded orders on the simulated accelerator, and defects of older versions shown on it."""
