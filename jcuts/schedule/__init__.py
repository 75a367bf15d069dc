"""Schedules: tiles, vector lanes, splits and loop orders to try for an unscheduled program, with cost models.

`cpu/` for CPUs, `gpu/` for NVIDIA GPUs.
"""
