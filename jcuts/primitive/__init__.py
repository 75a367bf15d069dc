"""`jcuts_call_p`, the primitive that carries a function through JAX's transformations: autodiff, batching, sharding,
lowering.
"""
