"""What a user runs: the loop that all stages share, and a package for each kind of training."""
