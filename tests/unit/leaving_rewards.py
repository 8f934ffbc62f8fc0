"""A module of reward functions that its process cannot be without a GPU."""

import sys

sys.exit("no GPU")
