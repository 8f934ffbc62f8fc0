"""The sections of a job's config: a dataclass is a YAML mapping, its fields are the keys."""
