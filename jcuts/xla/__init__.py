"""XLA integration: typed FFI custom calls and launchers for CPU and CUDA, kernel and object caches, jaxpr rebuilding.

In: compiled kernels and the partition of a jaxpr.  Out: a jaxpr whose chosen regions are FFI calls.  `chains/` fuses
neighbouring GPU calls into one, `cudnn/` calls cuDNN's convolutions.
"""
