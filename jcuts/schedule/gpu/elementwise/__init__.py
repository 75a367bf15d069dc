"""Element-wise schedules: register tiles, concatenations, shared-memory transposes."""
