"""Launch fusion: several CUDA kernels in one custom call (a *chain*), launched with programmatic dependent launch.

In: a jaxpr with kernel calls.  Out: the same with neighbouring calls merged.  `dataflow.py`, `order.py`,
`buffer_assignment.py`, `arena.py` and `peak_memory.py` are the steps of `fuse.py`.
"""
