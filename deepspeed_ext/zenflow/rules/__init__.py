"""The update rules: when a step hands gradients over, and how it computes weights from results."""
