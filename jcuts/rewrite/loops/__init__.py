"""Rewrites of loops: what leaves a recurrence, forward and backward, as one product over all steps."""
