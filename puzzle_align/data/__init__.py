"""From files to microbatches: no process group; data-parallel rank and size are ints."""
