"""Front end: user function -> closed jaxpr -> flat jaxpr; canonical digest, source locations, sharding rules.

`jaxapi/` is the only file that touches JAX internals.
"""
