"""Data, from files to microbatches. No process groups: rank and size are integers."""
