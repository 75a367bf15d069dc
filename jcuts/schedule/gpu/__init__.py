"""GPU schedules: which tiles, stages, splits and clusters to try for a program, ranked by a cycle model per kernel
family.

In: an unscheduled program and a `machine.GpuMachine`.  Out: scheduled programs with a score, best first
(`candidates.py`); what is chosen is measured.  `families.py` is the registry of the kernel families, and
`enumeration.py` says which of them are asked for a program; their schedules are in a folder each, named as in
`codegen/cuda`.  `launch_stats.py`, `traffic.py` and `coalescing.py` give the statistics behind the PUL score.
"""
