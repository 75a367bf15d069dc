"""Fused inverted residual (MBConv): expand 1x1 GEMM, depthwise convolution and project 1x1 GEMM in one kernel.

In: a program that `lower/patterns/inverted_residual.py` recognises, with a schedule of
`schedule/gpu/inverted_residual`.  `kernel.py` is the thread's code; the other files are its three stages and its loads.
"""
