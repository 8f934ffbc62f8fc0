"""Everything that uses torch.distributed: groups, executor, generation, checkpoints."""
