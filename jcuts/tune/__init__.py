"""Autotuner: a tuning problem (candidates of one region) in, a measured and verified choice out; nothing else measures.

`session.py` is the entry, `database.py` keeps the choices.  `parent/` schedules the work, `worker/` is the measuring
process, `measure/` takes times, `verify/` checks results against float64, `baseline/` is XLA's own code, `cudnn/`
measures convolution algorithms.
"""
