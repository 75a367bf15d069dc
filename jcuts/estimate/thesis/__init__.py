"""The analytical GPU model of the thesis: traffic ratios, shared-memory conflicts, PUL (processor utilisation level),
search space.
"""
