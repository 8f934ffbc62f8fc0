"""Device memory of a model, estimated in bytes for every pipeline rank.

Model state follows Megatron's mixed-precision layout. Activations follow Korthikanti et al. 2022,
"Reducing Activation Recomputation in Large Transformer Models", section 4, adapted to what these
models compute: RMSNorm, grouped queries, a gated MLP, no dropout but that of adapters' inputs
(``_dropped_bytes``), attention that stores no scores, and one row of S tokens per microbatch. A
layer keeps per token, with e bytes per number, hidden H,
q = heads * head_dim, k = key/value heads * head_dim, F the MLP's width, T tensor ranks and
s = T under sequence parallelism, else 1:

- ``2H/s`` inputs of the two norms, ``2H/s`` inputs of the QKV and gate/up projections;
- ``(q + 2k)/T`` rotated queries and keys, and values, ``q/T`` the attention's output, and
  ``(q + k)/T`` queries and keys before their norms, if they have norms;
- ``4r`` cosines and sines for queries and for keys, of the r channels of a head that are rotated;
- ``3F/T``: gate and up, and the product of up with the SiLU of the gate;
- in float32, the scales of the norms (2 per layer; for queries and keys, one per head);
- of the attention itself, in float32, the log-sum-exp of ``heads/T``; besides, with ``segments``,
  its output before it is put together (``q/T``), and further responses' keys and values after those
  of their prompts, on CUDA repeated for every head (``1.5q/T``: of pairs that are half prompts);
  with ``varlen``, prompts' keys and values once more, gathered (``k/T``: of pairs that are half
  prompts. Of K responses to each prompt it is ``2(K-1)pk/T``, p the prompts' share of the row: more
  than is estimated for groups of many samples; with one response there is nothing to gather); and
  with ``dense``, the S x S mask, which each layer converts and keeps (S), and on CUDA keys and
  values for every head (``2(q - k)/T`` more).

Recompute ``selective`` drops the last item, ``full`` keeps a layer's input alone. Every chunk of
layers keeps its output, H/s; the head's chunk also its predicting hidden states (at most S of H;
a scalar head has one per response, which is not counted; a critic, which values every token, keeps
them as computed and in float32).

A pipeline rank keeps its schedule's live activations, of chunks that may differ in layers. Added
to them is ``workspace``: memory in use only while one layer or one chunk of logits is
differentiated. Not counted: CUDA and its communicators (``job.MemoryInputs.cuda``),
fragmentation, and the normalised copy that torch's RMSNorm keeps if it is not fused (on CPU).
Savings of fused operations and FP8 are not counted either.
"""

from collections.abc import Mapping
from functools import lru_cache
from math import prod

from puzzle_align.layout.attention import BACKENDS
from puzzle_align.layout.model import (
    BYTES_PER_PARAMETER,
    ModelOptions,
    ModelSpec,
    layer_matmul_parameters,
    padded_vocab_size,
    rotary_channels,
    with_scalar_head,
    without_adapters,
)
from puzzle_align.layout.plan import ParallelPlan
from puzzle_align.layout.weights import is_trained, layer_parameters

GRADIENT_BYTES = 4  # accumulated in float32
# By the dtypes of weights and state: Adam's two moments; for bf16 weights also main weights, in
# float32 or as the two bytes per number that the bf16 weights lack.
OPTIMIZER_BYTES = {
    ("fp32", "fp32"): 8,
    ("bf16", "fp32"): 12,
    ("fp32", "bf16"): 4,
    ("bf16", "bf16"): 6,
}


@lru_cache(maxsize=256)
def layer_shard_parameters(spec: ModelSpec, tensor: int) -> int:
    """Parameters of one layer on one of ``tensor`` ranks, with its adapters."""
    return sum(prod(each.shape) for each in layer_parameters(spec, tensor, 0))


def rank_parameters(spec: ModelSpec, plan: ParallelPlan, rank: int) -> int:
    """Parameters on one tensor rank of pipeline rank ``rank``, all its chunks together.

    With P > 1 tied embeddings are on the first and on the last pipeline rank.
    """
    embedding = padded_vocab_size(spec) * spec.hidden_size // plan.tensor
    layers = plan.num_layers_on(rank, spec.num_hidden_layers)
    held = layers * layer_shard_parameters(spec, plan.tensor)
    is_first, is_last = rank == 0, rank == plan.pipeline - 1
    if is_first:
        held += embedding
    if is_last:
        held += spec.hidden_size  # the final norm
        if spec.head == "scalar":
            held += spec.hidden_size
        elif not (is_first and spec.tie_word_embeddings):
            held += embedding
    return held


def trained_parameters(spec: ModelSpec, plan: ParallelPlan, rank: int) -> int:
    """The ``rank_parameters`` that training moves: with adapters, these and a scalar head."""
    if spec.lora is None:
        return rank_parameters(spec, plan, rank)
    layer = layer_parameters(spec, plan.tensor, 0)
    adapters = sum(prod(each.shape) for each in layer if is_trained(spec, each.name))
    has_head = spec.head == "scalar" and rank == plan.pipeline - 1
    layers = plan.num_layers_on(rank, spec.num_hidden_layers)
    return layers * adapters + has_head * spec.hidden_size


def shared_parameters(spec: ModelSpec, lender: ModelSpec, plan: ParallelPlan, rank: int) -> int:
    """The ``rank_parameters`` that are another model's, of the same base under the same plan."""
    base, head = without_adapters(spec), 0
    if "scalar" in (spec.head, lender.head):  # scalar heads differ, and only one may have logits
        base = with_scalar_head(base)
        head = spec.hidden_size if rank == plan.pipeline - 1 else 0
    return rank_parameters(base, plan, rank) - head


def merged_parameters(spec: ModelSpec, plan: ParallelPlan, rank: int) -> int:
    """The ``rank_parameters`` that get memory of their own where adapters are added to them."""
    targets = spec.lora.target_modules if spec.lora is not None else ()
    adapted = (
        prod(parameter.shape)
        for parameter in layer_parameters(without_adapters(spec), plan.tensor, 0)
        if any(name.split(".")[-2] in targets for name, _ in parameter.tensors)
    )
    return plan.num_layers_on(rank, spec.num_hidden_layers) * sum(adapted)


def fp8_weight_bytes(
    spec: ModelSpec, plan: ParallelPlan, options: ModelOptions, rank: int, *, trained: bool
) -> int:
    """Bytes of the FP8 copies of a rank's layers, with transposed ones for the backward."""
    if options.fp8 is None:
        return 0
    matrices = layer_matmul_parameters(spec) // plan.tensor
    return (2 if trained else 1) * plan.num_layers_on(rank, spec.num_hidden_layers) * matrices


def layer_activation_bytes(
    spec: ModelSpec, plan: ParallelPlan, options: ModelOptions, row_tokens: int
) -> int:
    """Bytes that a layer keeps per microbatch for its backward, without full recompute."""
    element, tensor = BYTES_PER_PARAMETER[options.dtype], plan.tensor
    queries = spec.num_attention_heads * spec.head_dim
    keys = spec.num_key_value_heads * spec.head_dim
    sharded = 2 * queries + 2 * keys + 3 * spec.intermediate_size
    scales = 4 * 2 // plan.sequence_shards
    if spec.qk_norm:
        sharded += queries + keys
        scales += 4 * (spec.num_attention_heads + spec.num_key_value_heads) // tensor
    replicated = 4 * spec.hidden_size // plan.sequence_shards + 4 * rotary_channels(spec)
    kept = element * (sharded // tensor + replicated) + scales
    if options.recompute == "none":
        heads, backend = spec.num_attention_heads // tensor, BACKENDS[options.attention]
        kept += 4 * heads
        kept += element * backend.kept(heads, queries // tensor, keys // tensor, row_tokens)
    return row_tokens * (kept + _dropped_bytes(spec, plan, element))


def _dropped_bytes(spec: ModelSpec, plan: ParallelPlan, element: int) -> int:
    """Bytes a token of adapters' inputs after dropout, each with a mask of a byte a number."""
    if spec.lora is None or spec.lora.lora_dropout == 0:
        return 0
    cut = {
        "o_proj": spec.num_attention_heads * spec.head_dim // plan.tensor,
        "down_proj": spec.intermediate_size // plan.tensor,
    }
    whole = spec.hidden_size // plan.sequence_shards
    return (element + 1) * sum(cut.get(target, whole) for target in spec.lora.target_modules)


def layer_kept_bytes(
    spec: ModelSpec, plan: ParallelPlan, options: ModelOptions, row_tokens: int
) -> int:
    """Bytes that a layer keeps per microbatch: with full recompute its input alone."""
    kept = hidden_bytes if options.recompute == "full" else layer_activation_bytes
    return kept(spec, plan, options, row_tokens)


def chunk_activation_bytes(
    spec: ModelSpec, plan: ParallelPlan, options: ModelOptions, position: int, row_tokens: int
) -> int:
    """Bytes that a virtual position's layers keep per microbatch, with their output."""
    layers = len(plan.layers_of(position, spec.num_hidden_layers))
    layer = layer_kept_bytes(spec, plan, options, row_tokens)
    return layers * layer + hidden_bytes(spec, plan, options, row_tokens)


def columns_table(columns: Mapping[str, Mapping[str, int]]) -> str:
    """Table of ``columns[ranks][part]`` (bytes): a line per part, all sizes in GiB."""
    title, parts = "GiB on a rank of", next(iter(columns.values()))
    width = max(map(len, (title, *parts))) + 1
    lines = [f"{title:<{width}}" + "".join(f"{ranks:>12}" for ranks in columns)]
    for part in parts:
        cells = "".join(f"{_gib(sizes[part]):>12}" for sizes in columns.values())
        lines.append(f"{part:<{width}}{cells}")
    return "\n".join(lines)


def _gib(num_bytes: int) -> str:
    size = num_bytes / 2**30
    return f"{size:.2f}" if size >= 0.1 else f"{size:.2g}"


def hidden_bytes(
    spec: ModelSpec, plan: ParallelPlan, options: ModelOptions, row_tokens: int
) -> int:
    """Bytes of a row's hidden states between layers."""
    elements = row_tokens * spec.hidden_size // plan.sequence_shards
    return BYTES_PER_PARAMETER[options.dtype] * elements


def head_input_bytes(
    spec: ModelSpec, options: ModelOptions, row_tokens: int, *, values_tokens: bool = False
) -> int:
    """Bytes of the hidden states that the head on the last pipeline rank keeps.

    For one row: the last chunk's backward follows its forward. ``values_tokens``: a scalar head is
    applied at every token (a critic's), not only at the last of each response.
    """
    if spec.head == "scalar" and not values_tokens:
        return 0
    number = BYTES_PER_PARAMETER[options.dtype] + (4 if values_tokens else 0)
    return number * row_tokens * spec.hidden_size


def workspace_bytes(
    spec: ModelSpec,
    plan: ParallelPlan,
    options: ModelOptions,
    rank: int,
    row_tokens: int,
    *,
    trained: bool,
) -> int:
    """Bytes of the larger workspace: a layer's (``layer_workspace_bytes``) or the head's."""
    layer = layer_workspace_bytes(spec, plan, options, row_tokens)
    if rank < plan.pipeline - 1:
        return layer
    element = BYTES_PER_PARAMETER[options.dtype]
    hidden_of_row = element * row_tokens * spec.hidden_size
    # A chunk's logits exist in float32 and in the compute dtype, the head's gradient before it is
    # added to its buffer in the compute dtype; the gradient of the hidden states exists for the
    # predictions and for the row. A scalar head has no logits.
    vocab_size = padded_vocab_size(spec) // plan.tensor if spec.head == "lm" else 0
    predictions = min(options.logprob_chunk_size, row_tokens)
    head = predictions * vocab_size * (4 + element) + 2 * hidden_of_row
    if trained and spec.lora is None:  # else the head is frozen
        head += spec.hidden_size * vocab_size * element
    return max(layer, head)


def layer_workspace_bytes(
    spec: ModelSpec, plan: ParallelPlan, options: ModelOptions, row_tokens: int
) -> int:
    """Bytes of one layer's gradients and recomputed activations."""
    element = BYTES_PER_PARAMETER[options.dtype]
    layer = 2 * hidden_bytes(spec, plan, options, row_tokens)
    layer += element * row_tokens * 3 * spec.intermediate_size // plan.tensor
    if plan.sequence_parallel:  # a projection's input, gathered
        layer += element * row_tokens * spec.hidden_size
    if options.recompute == "full":
        layer += layer_activation_bytes(spec, plan, options, row_tokens)
    return layer
