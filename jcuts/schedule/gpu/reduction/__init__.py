"""Reduction schedules along columns; those along rows are in `schedule/gpu/candidates.py`."""
