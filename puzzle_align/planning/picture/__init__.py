"""Timelines as pictures: text for a terminal, PNG, Chrome trace. Traffic as a PNG."""
