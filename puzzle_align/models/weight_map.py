"""How a parameter of Megatron-core is made of the tensors of a Hugging Face checkpoint.

A rule names both sides and the operator between them. Each operator says which box of every
Hugging Face tensor one tensor rank needs (so that only that is read), how the boxes make the rank's
parameter, and how a whole parameter (one tensor rank) comes apart again; ``split`` undoes ``merge``
bit for bit.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from puzzle_align.layout.model import ModelSpec, padded_vocab_size

Shape = tuple[int, ...]
Box = tuple[tuple[int, int], ...]  # (start, end) in each dimension


class Operator(Protocol):
    """The relation between one parameter and one or more Hugging Face tensors."""

    def boxes(self, spec: ModelSpec, shapes: Sequence[Shape], size: int, rank: int) -> list[Box]:
        """What tensor rank ``rank`` of ``size`` needs of each tensor."""
        ...

    def merge(self, spec: ModelSpec, parts: Sequence[Tensor], size: int) -> Tensor:
        """The rank's parameter from those boxes."""
        ...

    def split(self, spec: ModelSpec, parameter: Tensor) -> list[Tensor]:
        """The Hugging Face tensors from a whole parameter."""
        ...


@dataclass(frozen=True)
class Plain:
    """One tensor, cut along ``dim`` over tensor ranks, or whole on each of them."""

    dim: int | None = None

    def boxes(self, spec: ModelSpec, shapes: Sequence[Shape], size: int, rank: int) -> list[Box]:
        """See Operator."""
        return [_cut(shapes[0], self.dim, size, rank)]

    def merge(self, spec: ModelSpec, parts: Sequence[Tensor], size: int) -> Tensor:
        """See Operator."""
        return parts[0]

    def split(self, spec: ModelSpec, parameter: Tensor) -> list[Tensor]:
        """See Operator."""
        return [parameter]


@dataclass(frozen=True)
class QueryGroups:
    """Query, key and value rows by query group: ``[q ... q, k, v]`` of each group in turn."""

    def boxes(self, spec: ModelSpec, shapes: Sequence[Shape], size: int, rank: int) -> list[Box]:
        """See Operator."""
        return [_cut(shape, 0, size, rank) for shape in shapes]

    def merge(self, spec: ModelSpec, parts: Sequence[Tensor], size: int) -> Tensor:
        """See Operator."""
        groups = spec.num_key_value_heads // size
        by_group = [part.unflatten(0, (groups, -1)) for part in parts]
        return torch.cat(by_group, dim=1).flatten(0, 1)

    def split(self, spec: ModelSpec, parameter: Tensor) -> list[Tensor]:
        """See Operator."""
        groups, width = spec.num_key_value_heads, spec.head_dim
        rows = (spec.num_attention_heads // groups * width, width, width)
        by_group = parameter.unflatten(0, (groups, -1)).split(rows, dim=1)
        return [part.flatten(0, 1) for part in by_group]


@dataclass(frozen=True)
class GateUp:
    """Gate rows, then up rows: each half is cut over tensor ranks by itself."""

    def boxes(self, spec: ModelSpec, shapes: Sequence[Shape], size: int, rank: int) -> list[Box]:
        """See Operator."""
        return [_cut(shape, 0, size, rank) for shape in shapes]

    def merge(self, spec: ModelSpec, parts: Sequence[Tensor], size: int) -> Tensor:
        """See Operator."""
        return torch.cat(list(parts))

    def split(self, spec: ModelSpec, parameter: Tensor) -> list[Tensor]:
        """See Operator."""
        return list(parameter.chunk(2))


@dataclass(frozen=True)
class VocabularyRows:
    """One row a token, padded with zero rows to the stored vocabulary, then cut by rows."""

    def boxes(self, spec: ModelSpec, shapes: Sequence[Shape], size: int, rank: int) -> list[Box]:
        """See Operator."""
        rows, hidden = shapes[0]
        share = padded_vocab_size(spec) // size
        return [((min(rows, rank * share), min(rows, (rank + 1) * share)), (0, hidden))]

    def merge(self, spec: ModelSpec, parts: Sequence[Tensor], size: int) -> Tensor:
        """See Operator."""
        missing = padded_vocab_size(spec) // size - parts[0].size(0)
        return F.pad(parts[0], (0, 0, 0, missing))

    def split(self, spec: ModelSpec, parameter: Tensor) -> list[Tensor]:
        """See Operator."""
        return [parameter[: spec.vocab_size]]


@dataclass(frozen=True)
class Rule:
    """One parameter and the tensors it is made of.

    ``shapes`` gives the Hugging Face tensors' shapes. ``fused`` is the parameter's name where the
    layer spec fuses the norm into the linear that follows it (Transformer Engine).
    """

    hf: tuple[str, ...]
    megatron: str
    operator: Operator
    shapes: Callable[[ModelSpec], tuple[Shape, ...]]
    fused: str | None = None


def _cut(shape: Shape, dim: int | None, size: int, rank: int) -> Box:
    return tuple(
        (extent * rank // size, extent * (rank + 1) // size) if axis == dim else (0, extent)
        for axis, extent in enumerate(shape)
    )


def _qkv_rows(spec: ModelSpec) -> tuple[int, int, int]:
    key_value = spec.num_key_value_heads * spec.head_dim
    return spec.num_attention_heads * spec.head_dim, key_value, key_value


def _hidden_vector(spec: ModelSpec) -> tuple[Shape, ...]:
    return ((spec.hidden_size,),)


def _head_vector(spec: ModelSpec) -> tuple[Shape, ...]:
    return ((spec.head_dim,),)


def _vocabulary_table(spec: ModelSpec) -> tuple[Shape, ...]:
    return ((spec.vocab_size, spec.hidden_size),)


INPUT_NORM = Rule(
    ("input_layernorm.weight",),
    "input_layernorm.weight",
    Plain(),
    _hidden_vector,
    fused="self_attention.linear_qkv.layer_norm_weight",
)
QKV_WEIGHT = Rule(
    ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"),
    "self_attention.linear_qkv.weight",
    QueryGroups(),
    lambda spec: tuple((rows, spec.hidden_size) for rows in _qkv_rows(spec)),
)
QKV_BIAS = Rule(
    ("self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias"),
    "self_attention.linear_qkv.bias",
    QueryGroups(),
    lambda spec: tuple((rows,) for rows in _qkv_rows(spec)),
)
Q_NORM = Rule(
    ("self_attn.q_norm.weight",), "self_attention.q_layernorm.weight", Plain(), _head_vector
)
K_NORM = Rule(
    ("self_attn.k_norm.weight",), "self_attention.k_layernorm.weight", Plain(), _head_vector
)
ATTENTION_OUTPUT = Rule(
    ("self_attn.o_proj.weight",),
    "self_attention.linear_proj.weight",
    Plain(dim=1),
    lambda spec: ((spec.hidden_size, spec.num_attention_heads * spec.head_dim),),
)
MLP_NORM = Rule(
    ("post_attention_layernorm.weight",),
    "pre_mlp_layernorm.weight",
    Plain(),
    _hidden_vector,
    fused="mlp.linear_fc1.layer_norm_weight",
)
GATE_UP = Rule(
    ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
    "mlp.linear_fc1.weight",
    GateUp(),
    lambda spec: ((spec.intermediate_size, spec.hidden_size),) * 2,
)
DOWN = Rule(
    ("mlp.down_proj.weight",),
    "mlp.linear_fc2.weight",
    Plain(dim=1),
    lambda spec: ((spec.hidden_size, spec.intermediate_size),),
)
EMBEDDING = Rule(
    ("model.embed_tokens.weight",),
    "embedding.word_embeddings.weight",
    VocabularyRows(),
    _vocabulary_table,
)
TIED_HEAD = Rule(EMBEDDING.hf, "output_layer.weight", VocabularyRows(), _vocabulary_table)
FINAL_NORM = Rule(("model.norm.weight",), "decoder.final_layernorm.weight", Plain(), _hidden_vector)
HEAD = Rule(("lm_head.weight",), "output_layer.weight", VocabularyRows(), _vocabulary_table)
SCALAR_HEAD = Rule(
    ("score.weight",), "output_layer.weight", Plain(), lambda spec: ((1, spec.hidden_size),)
)
