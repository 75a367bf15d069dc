"""GEMM schedules: ``mma.sync``, ``wgmma``, SIMT and memory-bound tiles, with their cycle models.

`wgmma.py` also dispatches over all families that compute contractions.
"""
