"""The callable that `jcuts.optimize` returns, and its first call: plan variants, tune, benchmark end to end, remember.

`optimized.py` is the callable, `variant_selection.py` the first call.
"""
