"""The XLA baseline of a region: its exported code, XLA's autotuning cache, bounds and interpolated times."""
