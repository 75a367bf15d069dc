"""Fusion: which equations become one kernel; greedy grouping, candidate regions, set partitioning, attention and MBConv
matches.

In: the tensor graph of a flat jaxpr.  Out: a partition into regions, each with a program or left to XLA.
"""
