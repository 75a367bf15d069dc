"""Results that a team checks in: whether they are complete for a call, and which of them are pinned."""
