"""The user's process in a tuning session: jobs, their order, worker processes with deadlines, the machine-wide lock."""
