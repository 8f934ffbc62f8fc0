"""Pure tensor functions: no Megatron, no process groups."""
