"""Probes: measurements of the cost of communication after the training."""
