"""Skinny GEMM kernels: products of 2 to 16 rows (decoding with several sequences, dense layers at small batches)."""
