"""The update rules: when a step hands gradients over, and how weights follow from what has
arrived."""
