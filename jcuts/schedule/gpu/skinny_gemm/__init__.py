"""Schedules of the skinny GEMM: products of 2 to 16 rows, bound by the memory that holds the weights."""
