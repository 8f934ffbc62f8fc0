"""Model chunks: the layers of one pipeline position, with embedding and head at the ends.

Shapes: S tokens in the row, N predictions, H hidden, V padded vocabulary, T tensor ranks. Between
pipeline positions the hidden state is ``[S, 1, H]``, or ``[S/T, 1, H]`` under sequence parallelism.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, cast

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    gather_from_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from megatron.core.transformer.transformer_block import TransformerBlock, TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import make_tp_sharded_tensor_for_checkpoint
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from puzzle_align.algos.logprobs import (
    join_entropies,
    join_statistics,
    linear_logprob_parts,
    logits_of,
)
from puzzle_align.layout.model import (
    FP8_MULTIPLES,
    Fp8Recipe,
    ModelOptions,
    ModelSpec,
    padded_vocab_size,
)
from puzzle_align.layout.plan import ParallelPlan
from puzzle_align.models.attention import AttentionPlan
from puzzle_align.models.attention.core_attention import RowState, bind_row_state
from puzzle_align.models.cpu import engine_device
from puzzle_align.models.inputs import Predictions
from puzzle_align.models.layers import inverse_frequencies, rotary_angles
from puzzle_align.models.lora import add_adapters, seed_dropout
from puzzle_align.models.megatron_config import (
    fuse_gradient_accumulation,
    layer_specs,
    transformer_config,
)

_EXTRA_STATE = "_extra_state"


class ScalarHead(nn.Module):
    """Head with one output for a token, a reward or a value: a linear map without bias.

    It computes in float32 for weights of any precision. It is replicated on tensor ranks: its input
    must be equal on them, and the backward of its input must not sum over them, since each rank's
    gradient is already complete.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        shape, dtype = (1, config.hidden_size), config.params_dtype
        self.weight = nn.Parameter(torch.empty(shape, dtype=dtype, device=engine_device()))

    def forward(self, hidden: Tensor) -> Tensor:
        """Map hidden states ``[N, hidden_size]`` to float32 ``[N]``."""
        return F.linear(hidden.float(), self.weight.float()).squeeze(1)


class ModelChunk(LanguageModule):
    """Megatron's layers for packed rows, with log-probabilities or scalars as outputs.

    The modules have the names of Megatron's GPTModel, and so have the checkpoints' keys.
    ``row_state.current`` must hold the row's attention plan during forward and backward, where
    recompute reads it again.
    """

    inverse_frequencies: Tensor

    def __init__(
        self,
        config: TransformerConfig,
        layers: TransformerBlockSubmodules,
        groups: ProcessGroupCollection,
        spec: ModelSpec,
        *,
        is_first: bool,
        is_last: bool,
        virtual_stage: int | None,
        vocab_rows: int,
        logprob_chunk_size: int,
    ) -> None:
        """Build the modules; their parameters are uninitialised.

        Args:
            is_first: whether this chunk embeds the tokens.
            is_last: whether it has the head.
            virtual_stage: number of the chunk on its rank; None if it is the only one.
            vocab_rows: rows of the embedding and the head over all tensor ranks.
            logprob_chunk_size: predictions whose logits are in memory at once.
        """
        super().__init__(config, groups)
        self.spec, self.logprob_chunk_size = spec, logprob_chunk_size
        # Rounded as transformers rounds it, and no tensor: its copy would wait for the device.
        multiplier = torch.tensor(spec.embedding_multiplier, dtype=config.params_dtype)
        self._multiplier = multiplier.item()
        self.is_first, self.is_last = is_first, is_last
        # Megatron reads these names.
        self.pre_process, self.post_process, self.vp_stage = is_first, is_last, virtual_stage
        self.share_embeddings_and_output_weights = spec.tie_word_embeddings
        if is_first:
            self.embedding = LanguageModelEmbedding(
                config, vocab_rows, spec.max_position_embeddings, "none", tp_group=groups.tp
            )
        self.decoder = TransformerBlock(
            config,
            layers,
            pre_process=is_first,
            post_process=is_last,
            pg_collection=groups,
            vp_stage=virtual_stage,
        )
        if is_last:
            self.output_layer = self._head(vocab_rows)
        self.adapters = add_adapters(self, spec)
        if is_first or is_last:
            self.setup_embeddings_and_output_layer()
        for module in self.modules():
            if hasattr(module, "finish_init"):  # Transformer Engine's layers
                module.finish_init(None)  # type: ignore[operator]
        self.row_state = RowState()
        bind_row_state(self, self.row_state)
        self._fp8_copies_are_old = True
        self.statistics = False  # whether outputs include ``STATISTICS`` of the softmaxes
        frequencies = inverse_frequencies(spec).to(engine_device())  # float32 [R/2]
        self.register_buffer("inverse_frequencies", frequencies, persistent=False)
        self.register_load_state_dict_post_hook(_after_loading)

    def _head(self, vocab_rows: int) -> tensor_parallel.ColumnParallelLinear | ScalarHead:
        if self.spec.head == "scalar":
            return ScalarHead(self.config)
        return tensor_parallel.ColumnParallelLinear(
            self.config.hidden_size,
            vocab_rows,
            config=self.config,
            init_method=cast(Any, self.config.init_method),
            bias=False,
            skip_weight_param_allocation=self.is_first and self.spec.tie_word_embeddings,
            tp_group=self.pg_collection.tp,
        )

    def set_input_tensor(self, hidden: Tensor) -> None:
        """Set the hidden state that the next forward of any chunk but the first begins with."""
        self.decoder.set_input_tensor(hidden)

    def forward(self, tokens: Tensor, position_ids: Tensor, predictions: Predictions) -> Tensor:
        """Run the chunk on one row.

        Args:
            tokens: int64 ``[1, S]``; only the first chunk reads them (the others read the input
                from ``set_input_tensor``).
            position_ids: int64 ``[1, S]``.
            predictions: read by the last chunk only.

        Returns:
            Any chunk but the last: the hidden state ``[S, 1, H]`` (``[S/T, 1, H]`` under sequence
            parallelism).
            Last chunk: log-probabilities of the targets, float32 ``[N]``; with entropies, in nats,
            ``[2, N]``; with ``statistics`` (``algos.logprobs.STATISTICS``) ``[5, N]``. Without
            targets: this tensor rank's logits, float32 ``[N, V/T]``; logits of the vocabulary's
            padding are included and meaningless.
            Last chunk with a scalar head: float32 ``[N]``.
        """
        with self._precision_of_row():
            hidden = self.decoder(
                hidden_states=self._embedded(tokens, position_ids) if self.is_first else None,
                attention_mask=None,
                rotary_pos_emb=rotary_angles(position_ids, self.inverse_frequencies),
            )
        self.decoder.input_tensor = None  # Megatron would keep it, and its gradient
        if not self.is_last:
            return hidden
        if self.spec.head == "scalar":
            return self._scalars(hidden, predictions)
        return self._predicted(hidden, predictions)

    @property
    def head_weight(self) -> Tensor:
        """The head's weight: this tensor rank's rows ``[V/T, H]``, or a scalar head's ``[1, H]``.

        It is the embedding's if tied.
        """
        tied = self.share_embeddings_and_output_weights
        weight = self.shared_embedding_or_output_weight() if tied else self.output_layer.weight
        assert weight is not None, "only the last chunk has a head"
        return weight

    def mark_changed(self) -> None:
        """Invalidate the FP8 copies of the weights, which have changed since the last forward."""
        self._fp8_copies_are_old = True

    @contextmanager
    def _precision_of_row(self) -> Iterator[None]:
        """FP8 if the model uses it, except for rows that FP8 cannot take, such as generation's.

        Transformer Engine makes FP8 copies of the weights in a forward marked as a first
        microbatch, and uses them until the next such forward. Megatron's schedules set the mark;
        here the chunk does, in the first forward that needs the copies.

        A first-microbatch backward overwrites ``main_grad`` instead of accumulating, where
        Transformer Engine adds up gradients itself. That is right only because ``zero_grad_buffer``
        has come between the backwards before and this forward, and because a chunk's backwards run
        in the order of its forwards: weights must not change between a step's first backward and
        its last.
        """
        fp8 = self.config.fp8
        if fp8 is None:
            yield
        elif self._row_fits_fp8():
            if self._fp8_copies_are_old:
                self.set_is_first_microbatch()
                self._fp8_copies_are_old = False
            yield
        else:
            self.config.fp8 = None
            try:
                yield
            finally:
                self.config.fp8 = fp8

    def _row_fits_fp8(self) -> bool:
        recipe = cast(Fp8Recipe, self.config.fp8_recipe)
        row, multiple = self.row_state.current, FP8_MULTIPLES[recipe]
        if self.config.sequence_parallel:
            multiple *= self.pg_collection.tp.size()
        return isinstance(row, AttentionPlan) and row.num_tokens % multiple == 0

    def _embedded(self, tokens: Tensor, position_ids: Tensor) -> Tensor:
        """Embed the row: ``[S, 1, H]``, in the memory layout of all later hidden states.

        Megatron's transpose of ``[1, S, H]`` has other strides, for which torch.matmul takes
        another path if the weight is frozen: a reference would differ in rounding from the policy
        with equal weights.
        """
        embedded = self.embedding(tokens, position_ids).flatten(0, 1).unsqueeze(1)
        if self.spec.embedding_multiplier != 1:
            embedded = embedded * self._multiplier
        if self.spec.lora is not None and torch.is_grad_enabled():
            # A frozen embedding's output: recompute makes a backward only for inputs that need one.
            embedded.requires_grad_()
        return embedded

    def _whole(self, hidden: Tensor) -> Tensor:
        """All hidden states ``[S, 1, H]`` on every tensor rank; the backward sums over ranks."""
        if self.config.sequence_parallel:
            return gather_from_sequence_parallel_region(hidden, group=self.pg_collection.tp)
        return copy_to_tensor_model_parallel_region(hidden, group=self.pg_collection.tp)

    def _predicted(self, hidden: Tensor, predictions: Predictions) -> Tensor:
        """Outputs of a language model's head; each tensor rank computes its share of a softmax."""
        group, weight = self.pg_collection.tp, self.head_weight
        # Indexed, not by index_select: its backward adds in any order on CUDA.
        predicting = self._whole(hidden).squeeze(1)[predictions.predict_from]
        if predictions.targets is None:
            logits = logits_of(predicting, weight)
            return logits if self.spec.logits_scaling == 1 else logits / self.spec.logits_scaling
        parts = linear_logprob_parts(
            predicting,
            weight,
            predictions.targets,
            vocab_start=group.rank() * weight.size(0),
            vocab_size=self.spec.vocab_size,
            chunk_size=self.logprob_chunk_size,
            temperature=predictions.temperature * self.spec.logits_scaling,
            entropies=predictions.entropies,
            statistics=self.statistics,
        )
        lse_parts = gather_from_tensor_model_parallel_region(parts.lse[:, None], group=group)
        target_logit = reduce_from_tensor_model_parallel_region(parts.target_logit, group=group)
        log_probs = target_logit - torch.logsumexp(lse_parts, dim=-1)
        if parts.statistics is not None:
            gathered = gather_from_tensor_model_parallel_region(parts.statistics, group=group)
            shards = gathered.unflatten(-1, (group.size(), -1))
            statistics = join_statistics(
                lse_parts, shards, predictions.targets, vocab_size=self.spec.vocab_size
            )
            return torch.cat([log_probs[None], statistics])
        if parts.entropy is None:
            return log_probs
        entropies = gather_from_tensor_model_parallel_region(parts.entropy[:, None], group=group)
        return torch.stack([log_probs, join_entropies(lse_parts, entropies)])

    def _scalars(self, hidden: Tensor, predictions: Predictions) -> Tensor:
        """Outputs of a scalar head, computed on every tensor rank: the backward must not sum."""
        if self.config.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(
                hidden, tensor_parallel_output_grad=False, group=self.pg_collection.tp
            )
        return self.output_layer(hidden.squeeze(1)[predictions.predict_from])

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple = (),
        metadata: dict | None = None,
    ) -> dict[str, Any]:
        """Megatron's sharded state, by default with this model's data-parallel group.

        Transformer Engine's extra state is left out: checkpoints of local layers must load into
        Transformer Engine's, and the supported FP8 recipes are stateless.
        """
        metadata = {"dp_cp_group": self.pg_collection.dp_cp, **(metadata or {})}
        state = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        if self.spec.head == "scalar" and self.is_last:
            # Megatron lets heads of other vocabulary sizes load: then this would load their row 0.
            state[f"{prefix}output_layer.weight"].allow_shape_mismatch = False
        return {key: value for key, value in state.items() if not key.endswith(_EXTRA_STATE)}

    def tie_embeddings_and_output_weights_state_dict(
        self,
        sharded_state_dict: dict[str, Any],
        output_layer_weight_key: str,
        first_stage_word_emb_key: str,
        metadata: dict = {},  # noqa: B006 - Megatron's signature
    ) -> None:
        """Save the last chunk's copy of a tied embedding as a replica of the first chunk's.

        Megatron's method reads the data-parallel rank from its global state, which is never set.
        """
        if not self.is_last or self.is_first:
            return
        group = metadata["dp_cp_group"]
        sharded_state_dict[output_layer_weight_key] = make_tp_sharded_tensor_for_checkpoint(
            tensor=self.head_weight,
            key=first_stage_word_emb_key,
            replica_id=(1, 0, group.rank()),
            allow_shape_mismatch=True,
            tp_group=self.pg_collection.tp,
            dp_cp_group=group,
        )


def _after_loading(chunk: ModelChunk, keys: Any) -> None:
    """Post-load hook: invalidate the weights' FP8 copies, ignore missing extra state."""
    chunk.mark_changed()
    keys.missing_keys[:] = [key for key in keys.missing_keys if not key.endswith(_EXTRA_STATE)]


def build_chunk(
    spec: ModelSpec,
    options: ModelOptions,
    plan: ParallelPlan,
    groups: ProcessGroupCollection,
    *,
    chunk: int = 0,
    vocab_rows: int | None = None,
    has_memory: bool = True,
) -> ModelChunk:
    """Build this rank's model chunk number ``chunk`` (of ``plan.virtual_pipeline``).

    The plan must divide the model (``division_problems``). Parameters are uninitialised until they
    are loaded. With tied embeddings this is a collective of the first and the last pipeline rank,
    so every rank of the plan must build its chunks.

    Args:
        vocab_rows: rows of the embedding and of the head over all tensor ranks; None: the padded
            vocabulary. Other numbers are for measuring one shard alone.
        has_memory: false: parameters are empty, until ``Shards`` gives them memory; only the
            module that is being built has any.
    """
    if not tensor_parallel.get_cuda_rng_tracker().is_initialized():
        # Megatron forks its state under sequence parallelism and recompute, though none draws.
        seed_dropout((0,), groups.tp.rank())
    position = chunk * plan.pipeline + groups.pp.rank()
    config = transformer_config(spec, options, plan, position)
    layers = plan.layers_of(position, spec.num_hidden_layers)
    with nullcontext() if has_memory else _freed_when_registered():
        model = ModelChunk(
            config,
            layer_specs(spec, options, len(layers)),
            groups,
            spec,
            is_first=position == 0,
            is_last=position == plan.num_positions - 1,
            virtual_stage=chunk if plan.virtual_pipeline > 1 else None,
            vocab_rows=vocab_rows or padded_vocab_size(spec),
            logprob_chunk_size=options.logprob_chunk_size,
        )
    if options.fusions.gradient_accumulation_fusion:
        fuse_gradient_accumulation(model)
    return model


@contextmanager
def _freed_when_registered() -> Iterator[None]:
    """Free the memory of the parameters that modules register within the block."""

    def free(_module: nn.Module, _name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None:
            parameter.data = parameter.new_empty(0)

    handle = register_module_parameter_registration_hook(free)
    try:
        yield
    finally:
        handle.remove()
