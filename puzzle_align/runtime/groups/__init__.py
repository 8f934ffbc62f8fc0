"""Process groups: this process in the job, what a model talks through, values for all ranks."""
