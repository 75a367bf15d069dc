"""Back-to-back GEMM (B2B GEMM, fused MLP): two GEMMs and both epilogues in one kernel.

In: a program that `lower/patterns/b2b_gemm.py` recognises, with a schedule of `schedule/gpu/b2b_gemm`.  `kernel.py` is
the thread's code; loads, the two GEMMs and their epilogues are shared with the fused inverted residual.
"""
