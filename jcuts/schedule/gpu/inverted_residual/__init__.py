"""Schedules of the fused inverted residual: block tiles and their cycle model."""
