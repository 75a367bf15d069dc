"""Names that a program of a scan has for its axes and for what it carries along (`region.scan`)."""

CARRY = "carry"
TIME = "t"
LANE = "l"
