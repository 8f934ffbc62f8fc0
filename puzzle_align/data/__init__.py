"""Data, from files to microbatches, without process groups: rank and size are integers."""
