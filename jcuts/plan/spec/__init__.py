"""Planner inputs: models, layers, clusters, workloads; TOML files."""
