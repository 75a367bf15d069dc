"""Schedules of split-K GEMV: a matrix times one vector (dense layers at batch 1)."""
