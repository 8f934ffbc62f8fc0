"""The only home of torch.distributed: groups, executor, checkpoints, telemetry."""
