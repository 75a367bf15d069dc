"""Calibration of the planner: measures a cluster, fits its parameters, validates predictions."""
