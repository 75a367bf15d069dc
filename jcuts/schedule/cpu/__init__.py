"""CPU schedules: vector lanes, register tiles, loop order, packing, Winograd; ranked by a cycle and cache model.

In: an unscheduled program.  Out: scheduled programs with an estimate, best first (`candidates.py`).
"""
