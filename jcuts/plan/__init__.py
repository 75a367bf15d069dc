"""Analytical planner of distributed training: ranks mesh, schedule and offload tiers of a model on a cluster by step
time.

`spec/` holds the inputs, `cost/` the cost models, `search/` the plan search, `calibrate/` measures clusters;
`jax_mesh.py` turns a plan into a JAX mesh and shardings.  ``cost.jaxpr``, ``cost.program_memory``,
``cost.spmd_step``, ``jax_mesh`` and, when called, ``calibrate.measure`` import jax; everything else is NumPy (and cvxpy
in ``search.tier_placement``, SciPy in fits).
"""
