"""Search over meshes, schedules and offload: plan space, exhaustive search, unequal devices, tier placement."""
