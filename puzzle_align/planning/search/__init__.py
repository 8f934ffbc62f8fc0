"""The space of plans, and the searches for the fastest one that fits."""
