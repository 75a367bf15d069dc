"""The planner: which mesh, schedule and memory tiers a model should use on a cluster, and what a step then costs.

``from_jaxpr``, ``liveness``, ``step``, ``apply`` and, when called, ``measure`` import jax; everything else is NumPy
(and cvxpy in ``placement``, SciPy in fits).
"""
