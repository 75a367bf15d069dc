"""Calibration of the planner's cost models: measures a cluster, fits its parameters, validates predictions."""
