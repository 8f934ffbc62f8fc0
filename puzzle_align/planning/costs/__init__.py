"""Costs of work and of messages: the profile, and estimates from it."""
