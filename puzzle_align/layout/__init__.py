"""Models, plans, ranks and rows, and the places of each: plain data; imports no torch."""
