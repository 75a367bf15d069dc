"""Convolution schedules: implicit GEMM with halo reuse, its cluster split-K variant, few-channel convolutions."""
