"""The JAX primitive `jcuts_call_p`, with its rules for autodiff, batching, sharding and lowering."""
