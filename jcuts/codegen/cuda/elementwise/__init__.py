"""Element-wise kernels: a register tile per thread, shared-memory transposes, horizontal fusion of small maps.

`thread_tile.py` is also the SIMT kernel of windows and of reductions that run inside a thread.
"""
