"""Facts of this machine, and the one rule that splits cores. Imports nothing of the package but its errors."""
