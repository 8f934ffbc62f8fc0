"""Megatron-core's configuration and layer specs for a model under a plan."""

from functools import partial
from typing import Any, cast

from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from puzzle_align.layout.model import ModelOptions, ModelSpec
from puzzle_align.layout.plan import ParallelPlan
from puzzle_align.models.attention.core_attention import PackedCoreAttention, PackedSelfAttention
from puzzle_align.models.inputs import DTYPES
from puzzle_align.models.layers import ACTIVATIONS, FUSED_ACTIVATIONS, RMSNorm, residual_sum

_RECOMPUTE: dict[str, dict[str, Any]] = {
    "full": {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    },
    "selective": {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
}


def transformer_config(
    spec: ModelSpec, options: ModelOptions, plan: ParallelPlan, position: int
) -> TransformerConfig:
    """Megatron's configuration of the chunk at a virtual position of the plan's pipeline.

    There is no dropout and no fused path except ``options.fusions``; the loader fills the weights.
    ``calculate_per_token_loss`` makes data-parallel ranks sum gradients: the caller's loss is
    already divided by the global number of examples.
    """
    dtype, fusions = DTYPES[options.dtype], options.fusions
    compiles_activation = fusions.bias_activation_fusion and options.transformer_impl == "local"
    return TransformerConfig(
        num_layers=spec.num_hidden_layers,
        hidden_size=spec.hidden_size,
        ffn_hidden_size=spec.intermediate_size,
        num_attention_heads=spec.num_attention_heads,
        num_query_groups=spec.num_key_value_heads,
        kv_channels=spec.head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=spec.rms_norm_eps,
        layernorm_zero_centered_gamma=spec.norm_offset == 1,
        qk_layernorm=spec.qk_norm,
        softmax_scale=spec.attention_multiplier,
        activation_func=ACTIVATIONS[spec.activation][1],
        gated_linear_unit=True,
        add_bias_linear=False,
        add_qkv_bias=spec.attention_bias,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        tensor_model_parallel_size=plan.tensor,
        pipeline_model_parallel_size=plan.pipeline,
        pipeline_model_parallel_layout=_PlannedLayers(spec, plan, position),
        sequence_parallel=plan.sequence_parallel,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=options.dtype == "bf16",
        init_method=_leave,
        output_layer_init_method=_leave,
        embedding_init_method=_leave,
        calculate_per_token_loss=True,
        bias_dropout_fusion=False,
        apply_rope_fusion=fusions.apply_rope_fusion,
        bias_activation_fusion=compiles_activation,
        use_te_activation_func=not compiles_activation,  # but that of the layer specs
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        fp8=cast(Any, options.fp8),
        fp8_recipe=cast(Any, options.fp8_recipe),
        gradient_accumulation_fusion=False,  # see fuse_gradient_accumulation
        **_RECOMPUTE.get(options.recompute, {}),
    )


def layer_specs(
    spec: ModelSpec, options: ModelOptions, num_layers: int
) -> TransformerBlockSubmodules:
    """Specs of ``num_layers`` layers: Transformer Engine's or Megatron's, with our attention."""
    is_te, activation = options.transformer_impl == "te", ACTIVATIONS[spec.activation][0]
    if is_te and options.fusions.bias_activation_fusion:
        activation = FUSED_ACTIVATIONS[spec.activation]
    layer, norm = _te_layer(spec) if is_te else _local_layer(spec)
    layer.submodules.self_attention.module = PackedSelfAttention
    layer.submodules.self_attention.submodules.core_attention = PackedCoreAttention
    layer.submodules.self_attn_bda = layer.submodules.mlp_bda = residual_sum(
        spec.residual_multiplier
    )
    _mlp_parts(layer).activation_func = activation
    return TransformerBlockSubmodules(layer_specs=[layer] * num_layers, layer_norm=norm)


class _PlannedLayers(PipelineParallelLayerLayout):
    """Megatron's layout of a plan's layers, bound to the chunk at ``position``.

    Megatron numbers a chunk's layers, in the model and in checkpoints, by an offset that it asks
    for without passing the position; its own method reads the global state, which is never set.
    """

    def __init__(self, spec: ModelSpec, plan: ParallelPlan, position: int) -> None:
        layers = [
            plan.layers_of(number, spec.num_hidden_layers) for number in range(plan.num_positions)
        ]
        names = [["decoder"] * len(chunk_layers) for chunk_layers in layers]
        names[0].insert(0, "embedding")
        names[-1].append("loss")
        super().__init__(names, plan.pipeline)
        self._first = layers[position].start

    def get_layer_offset(self, *_args: Any, **_kwargs: Any) -> int:
        """Number of layers before the chunk."""
        return self._first


def fuse_gradient_accumulation(model: nn.Module) -> None:
    """Make Transformer Engine's layers accumulate weight gradients directly in ``main_grad``.

    Megatron's switch ``gradient_accumulation_fusion`` would also reach its output layer, of which
    we use only the weight, and which needs Apex for it. Frozen weights are unaffected.
    """
    for module in model.modules():
        if hasattr(module, "fuse_wgrad_accumulation"):
            module.fuse_wgrad_accumulation = True  # type: ignore[assignment]


def _mlp_parts(layer: Any) -> Any:
    mlp = layer.submodules.mlp  # a ModuleSpec; from Megatron-core 0.17 on a partial
    return mlp.keywords["submodules"] if isinstance(mlp, partial) else mlp.submodules


def _te_layer(spec: ModelSpec) -> tuple[Any, Any]:
    from megatron.core.extensions.transformer_engine import TEColumnParallelLinear, TENorm

    layer: Any = get_gpt_layer_with_transformer_engine_spec(qk_layernorm=spec.qk_norm)
    if spec.lora is not None:  # adapters read what the norm makes: it is a layer of its own
        parts = layer.submodules
        parts.input_layernorm = parts.pre_mlp_layernorm = TENorm
        parts.self_attention.submodules.linear_qkv = TEColumnParallelLinear
        _mlp_parts(layer).linear_fc1 = TEColumnParallelLinear
        local, _ = _local_layer(spec)  # whose norms are layers, and checkpoints the same
        parts.sharded_state_dict_keys_map = local.submodules.sharded_state_dict_keys_map
    return layer, TENorm


def _local_layer(spec: ModelSpec) -> tuple[Any, Any]:
    layer: Any = get_gpt_layer_local_spec(qk_layernorm=spec.qk_norm, normalization="RMSNorm")
    layer.submodules.input_layernorm = RMSNorm
    layer.submodules.pre_mlp_layernorm = RMSNorm
    if spec.qk_norm:
        attention = layer.submodules.self_attention.submodules
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    return layer, RMSNorm


def _leave(weight: Tensor) -> None:
    """Initialise nothing: ``load_weights`` fills every parameter."""
