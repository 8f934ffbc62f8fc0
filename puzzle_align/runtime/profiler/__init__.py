"""Measurements of a model's shard and of links on the job's ranks; callers choose the cases."""
