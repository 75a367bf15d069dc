"""Pattern matchers on kernel programs: GEMM, convolution windows, attention, inverted residual, Winograd.

In: a program.  Out: its operands and extents in the canonical form, or the reason why it does not match.
"""
