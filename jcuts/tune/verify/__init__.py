"""Numerical verification of candidates: test inputs, float64 references, error bounds of sums, the acceptance rule."""
