"""Rewrites of backward passes: sums of deviations from a mean, convolutions, and residuals that are computed again."""
