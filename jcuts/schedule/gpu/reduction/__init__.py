"""Reduction schedules along rows (`row.py`) and along columns (`column.py`), scans included."""
