"""Random JAX programs for the differential test (`benchmarks/differential/cpu.py`, `tests/differential/`)."""
