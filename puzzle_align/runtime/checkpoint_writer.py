"""Writes a checkpoint's tensors in the process that owns them.

Megatron-core's own writer starts a manager process and forks a writer for every file. That takes
seconds whatever the size, leaves processes behind when the job is killed, and waits for ever for a
writer that died early. torch's writer makes the same files without any process, syncs them to the
disk, and raises on every rank what failed on one.
"""

from pathlib import Path

import torch.distributed.checkpoint as torch_checkpoint
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    TorchDistSaveShardedStrategy,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)


class InProcessSave(TorchDistSaveShardedStrategy):
    """Megatron's format ``torch_dist``, which ``dist_checkpointing.load`` knows."""

    def __init__(self) -> None:
        super().__init__("torch_dist", 1)

    def save(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: str | Path) -> None:
        """Write this rank's shards to ``checkpoint_dir``. Collective over the world.

        Raises:
            CheckpointException: (torch's) on every rank, with what failed on any.
        """
        by_key, _, _ = _replace_state_dict_keys_with_sharded_keys(
            sharded_state_dict, self.keep_only_main_replica
        )
        # One thread: what fails in torch's additional writer threads is lost.
        writer = torch_checkpoint.FileSystemWriter(
            checkpoint_dir, sync_files=True, thread_count=1, per_thread_copy_ahead=0
        )
        torch_checkpoint.save(
            mcore_to_pyt_state_dict(by_key, False),
            storage_writer=writer,
            planner=MCoreSavePlanner(
                flatten_state_dict=False, can_run_decentralized_global_plan=False
            ),
        )
