"""How a model moves from one parallel plan to another: plain data, no torch."""
