"""Action lists: pure Python, no torch."""
