"""Many seeded orders on the simulated accelerator."""
