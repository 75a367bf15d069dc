"""Multi-versioned JIT: the callable of `jcuts.optimize`, and its first call (plan variants, tune, benchmark, remember).

`optimized.py` is the callable, `variant_selection.py` the first call.
"""
