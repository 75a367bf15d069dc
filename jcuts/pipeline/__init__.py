"""Pass pipeline on one closed jaxpr: inline, simplify, rewrite, group, select kernels, compile, rebuild with kernel
calls.

`passes.py` is the list.  In: a closed jaxpr and settings.  Out: a closed jaxpr of the same signature, and a report.
"""
