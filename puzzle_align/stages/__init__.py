"""What a user runs: one file a stage."""
