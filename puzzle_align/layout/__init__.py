"""What lies where (models, plans, ranks, rows): plain data; imports no torch."""
