"""Random JAX programs for the differential test (`benchmarks/differential.py`, `tests/differential/`)."""
