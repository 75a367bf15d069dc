"""Weights that a kernel prefetches into the L2 cache before it waits for the kernel in front (``griddepcontrol.wait``).

In: the program of one kernel.  Out: the ranges of its operands (`operands.prefetched_ranges`).
"""
