"""puzzle_align: a Megatron-style runtime that aligns large language models."""

__version__ = "0.1.0"
