"""JAX programs in: user function -> closed jaxpr -> flat jaxpr; canonical digest, source lines, sharding rules.

`jaxapi/` is the only file that touches JAX internals.
"""
