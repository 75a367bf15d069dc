"""Names of the axes and of the carry buffer in a prefix-scan program (`lower/scan.py`)."""

CARRY = "carry"
TIME = "t"
LANE = "l"
