"""Build one model chunk of a model under a plan, in its process groups."""

from megatron.core import tensor_parallel
from megatron.core.process_groups_config import ProcessGroupCollection

from puzzle_align.layout.model import ModelOptions, ModelSpec, padded_vocab_size
from puzzle_align.layout.plan import ParallelPlan
from puzzle_align.models.attention import RowState, bind_row_state
from puzzle_align.models.chunk import ModelChunk, Predictions
from puzzle_align.models.cpu import engine_device
from puzzle_align.models.layers import inverse_frequencies
from puzzle_align.models.megatron_config import (
    check_plan,
    fuse_gradient_accumulation,
    layer_specs,
    transformer_config,
)

__all__ = ["ModelChunk", "Predictions", "build_chunk"]


def build_chunk(
    spec: ModelSpec,
    options: ModelOptions,
    plan: ParallelPlan,
    groups: ProcessGroupCollection,
    *,
    chunk: int = 0,
    seed: int = 0,
    vocab_rows: int | None = None,
) -> ModelChunk:
    """Build this rank's model chunk number ``chunk`` (of ``plan.virtual_pipeline``).

    Parameters hold no meaningful values until ``load_weights``. For tied embeddings the first and
    the last pipeline rank meet in a collective, so every rank of the plan must build its chunks.

    Args:
        seed: the seed of the process's random states, which its first model sets.
        vocab_rows: rows of the embedding and of the head, all tensor ranks together; None: the
            padded vocabulary. Other numbers are for a shard that is measured alone.

    Raises:
        ValueError: if the model cannot be cut as the plan asks.
    """
    check_plan(spec, plan)
    _set_random_states_once(seed, groups.tp.rank())
    position = chunk * plan.pipeline + groups.pp.rank()
    config = transformer_config(spec, options, plan, position)
    layers = plan.layers_of(position, spec.num_hidden_layers)
    row_state = RowState()
    model = ModelChunk(
        config,
        layer_specs(spec, options, len(layers)),
        vocab_size=vocab_rows or padded_vocab_size(spec),
        max_sequence_length=spec.max_position_embeddings,
        pre_process=position == 0,
        post_process=position == plan.num_positions - 1,
        share_embeddings_and_output_weights=spec.tie_word_embeddings,
        pg_collection=groups,
        vp_stage=chunk if plan.virtual_pipeline > 1 else None,
        row_state=row_state,
        inverse_frequencies=inverse_frequencies(spec).to(engine_device()),
        spec=spec,
        logprob_chunk_size=options.logprob_chunk_size,
    )
    bind_row_state(model, row_state)
    if options.fusions.gradient_accumulation_fusion:
        fuse_gradient_accumulation(model)
    return model


def _set_random_states_once(seed: int, tensor_rank: int) -> None:
    """Give the process its random states, which all its models share, with the first of them.

    Nothing draws from them: there is no dropout, and weights come from the loader. But Megatron
    forks a named one under sequence parallelism and recompute, and checkpoints carry them.
    """
    if not tensor_parallel.get_cuda_rng_tracker().is_initialized():
        tensor_parallel.model_parallel_cuda_manual_seed(
            seed, tp_rank=tensor_rank, ep_rank=0, etp_rank=0
        )
