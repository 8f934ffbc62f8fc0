"""What the command line does besides training: validate, inspect, generate, convert."""
