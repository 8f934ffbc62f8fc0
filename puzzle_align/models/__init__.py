"""The seam to Megatron-core."""
