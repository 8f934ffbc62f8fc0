"""Everything that uses torch.distributed: groups, executor, generation, checkpoints."""

import puzzle_align.models  # noqa: F401 - guards imports by Megatron-core, so it comes first
