"""Models built from Megatron-core's modules."""
