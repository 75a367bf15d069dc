"""Schedules of windows (pooling, depthwise convolution, their gradients) and their cost model."""
