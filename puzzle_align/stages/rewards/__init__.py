"""Rewards of responses: a reward model's numbers and users' functions, summed.

``functions`` finds, calls and checks users' functions; ``worker`` is the process that they run in;
``rewards`` gives a rank's responses their scores.
"""
