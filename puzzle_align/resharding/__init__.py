"""Moving a model from one parallel plan to another: plain data, no torch."""
