"""Plain descriptions (models, plans, rows, jobs): frozen dataclasses that import no torch."""
