"""Users' reward functions: how they are found, called and checked, and the process they run in."""
