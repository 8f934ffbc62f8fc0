"""The only home of torch.distributed: groups, executor, generation, checkpoints."""
