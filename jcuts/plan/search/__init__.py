"""Plan search: plan space, exhaustive search, heterogeneous clusters, tensor placement in memory tiers (MILP)."""
