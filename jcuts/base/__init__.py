"""Lowest layer: errors, settings, knobs (every ``JCUTS_*`` variable), fingerprints, SQLite and CSV files; no JAX, no
numba.
"""
