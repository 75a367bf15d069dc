"""Window kernels (pooling, depthwise convolution, their gradients) with a sliding window in registers.

Without a sliding window these are kernels of `codegen/cuda/elementwise/thread_tile.py`.
"""
