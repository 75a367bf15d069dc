"""Rewrites of backward passes: sums of deviations from a mean, and residuals that are computed again."""
