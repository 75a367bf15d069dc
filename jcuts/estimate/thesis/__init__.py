"""The analytical GPU model of the thesis: ratios, shared memory, PUL (processor utilisation level), search space."""
