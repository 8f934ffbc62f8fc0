"""Users' reward functions: import, calls, checks, and the process that runs them."""
