"""Cost models of the planner: compute, collectives, memory, training step, inference, jaxpr and shard_map steps."""
