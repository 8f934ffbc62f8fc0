"""The sections of a job's config: a dataclass is a YAML mapping, a field one of its keys."""
