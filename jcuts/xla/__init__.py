"""Kernels as XLA custom calls: launchers for CPU and CUDA, kernel and object caches, the jaxpr with kernel calls.

In: compiled kernels and the partition of a jaxpr.  Out: a jaxpr whose chosen regions are typed FFI calls.  `chains/`
fuses neighbouring GPU calls into one, `cudnn/` calls cuDNN's convolutions.
"""
