"""Models built from Megatron-core's modules."""

from puzzle_align.models.transformer_engine import import_error

import_error()  # before Megatron-core, which imports it
