"""Schedules of persistent recurrences."""
