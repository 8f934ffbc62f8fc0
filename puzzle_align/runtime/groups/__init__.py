"""Process groups: joining the job, groups of models, and small values for all ranks."""
