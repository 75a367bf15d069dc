"""Recognisers of canonical forms in kernel programs: GEMM, convolution windows, attention, inverted residual, Winograd.

In: a program.  Out: its operands and extents in the terms of that form, or why it is none.
"""
