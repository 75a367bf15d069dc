"""The planner: which mesh, schedule and memory tiers a model should use on a cluster, and what a step then costs.

Only ``from_jaxpr`` and ``apply`` import jax; everything else is NumPy (and cvxpy in ``placement``).
"""
