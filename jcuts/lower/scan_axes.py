"""Names that a program of a scan has for its axes and for what it carries along (`lower/scan.py`)."""

CARRY = "carry"
TIME = "t"
LANE = "l"
