"""Costs of work and of messages: the profile, and what is estimated from it."""
