"""Accuracy of whole programs: results against plain XLA's and against a float64 run, reduced on the device."""
