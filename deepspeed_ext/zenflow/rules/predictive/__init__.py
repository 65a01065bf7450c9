"""The predictive rule: exact Adam on the host for every step, predicted weights on the
accelerator."""
