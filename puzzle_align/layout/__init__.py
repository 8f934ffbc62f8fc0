"""Geometry of models, plans, ranks and rows, as plain data; imports no torch."""
