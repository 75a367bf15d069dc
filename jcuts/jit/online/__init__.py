"""Online autotuning (``tune="online"``): calls run XLA's program while kernels compile in the background and are timed
between calls.
"""
