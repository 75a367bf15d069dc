"""The XLA baseline of a region: its exported code, XLA's autotuning results, bounds and interpolated times."""
