"""Split-K GEMV kernels: a matrix times one vector (dense layers at batch 1)."""
