"""Flash attention on tensor cores (``mma.sync``): K/V tile loader, score modification, online softmax.

In: a program of `lower/attention/forward.py` with a schedule of `schedule/gpu/attention`.  Out: the code of one thread.
"""
