"""Warp-specialised GEMM and implicit-GEMM convolution: producer warps copy, consumer warpgroups run ``wgmma``."""
