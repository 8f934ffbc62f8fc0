"""Rules that map tensors of a Hugging Face checkpoint to a parameter of Megatron-core.

A rule names both sides and the operator between them. An operator lists the pieces of one tensor
rank's parameter: boxes of the Hugging Face tensors, and the place in the parameter where each
begins. The rest of the parameter is padding, which is zero.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from math import prod

from puzzle_align.layout.model import LORA_TARGETS, ModelSpec, padded_vocab_size

Shape = tuple[int, ...]
Box = tuple[tuple[int, int], ...]  # (start, end) in each dimension


def extents(box: Box) -> Shape:
    """The shape of a box's content."""
    return tuple(end - start for start, end in box)


def around(boxes: Sequence[Box]) -> Box:
    """The smallest box that contains all of the boxes."""
    axes = zip(*boxes, strict=True)
    return tuple((min(start for start, _ in axis), max(end for _, end in axis)) for axis in axes)


def overlap(one: Box, other: Box) -> Box | None:
    """Intersection of two boxes; None if it is empty."""
    common = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))
    return common if all(start < end for start, end in common) else None


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of one Hugging Face tensor, and its place in a rank's parameter: ``start``."""

    tensor: str
    box: Box
    start: Shape

    @property
    def place(self) -> Box:
        """The piece's box in the parameter."""
        sizes = extents(self.box)
        return tuple((first, first + size) for first, size in zip(self.start, sizes, strict=True))


@dataclass(frozen=True)
class Plain:
    """Operator for one tensor, cut along ``dim`` over tensor ranks, or whole on each (None)."""

    dim: int | None = None

    def shape(self, spec: ModelSpec, shapes: Sequence[Shape], size: int) -> Shape:
        """The tensor's shape, cut along ``dim``."""
        return extents(_cut(shapes[0], self.dim, size, 0))

    def pieces(
        self, spec: ModelSpec, tensors: Sequence[tuple[str, Shape]], size: int, rank: int
    ) -> list[Piece]:
        """One piece: the tensor, or the rank's part of it."""
        ((name, shape),) = tensors
        return [Piece(name, _cut(shape, self.dim, size, rank), (0,) * len(shape))]


@dataclass(frozen=True)
class Stacked:
    """Operator that stacks tensors (gate, then up), each cut by rows over tensor ranks.

    ``by_query_group`` interleaves them by query group: ``[q ... q, k, v]`` of each.
    """

    by_query_group: bool = False

    def shape(self, spec: ModelSpec, shapes: Sequence[Shape], size: int) -> Shape:
        """The tensors' rows together, cut."""
        return sum(shape[0] for shape in shapes) // size, *shapes[0][1:]

    def pieces(
        self, spec: ModelSpec, tensors: Sequence[tuple[str, Shape]], size: int, rank: int
    ) -> list[Piece]:
        """The rank's rows of each tensor, in order; of each of its query groups, one by one."""
        groups = spec.num_key_value_heads if self.by_query_group else size
        pieces, row = [], 0
        for group in range(rank * groups // size, (rank + 1) * groups // size):
            for name, shape in tensors:
                box = _cut(shape, 0, groups, group)
                pieces.append(Piece(name, box, (row, *(0 for _ in shape[1:]))))
                row += extents(box)[0]
        return pieces


@dataclass(frozen=True)
class VocabularyRows:
    """Operator that pads a vocabulary table with zero rows, then cuts it by rows."""

    def shape(self, spec: ModelSpec, shapes: Sequence[Shape], size: int) -> Shape:
        """The padded rows, cut."""
        return padded_vocab_size(spec) // size, shapes[0][1]

    def pieces(
        self, spec: ModelSpec, tensors: Sequence[tuple[str, Shape]], size: int, rank: int
    ) -> list[Piece]:
        """The rank's rows; no piece if they are all padding."""
        ((name, (rows, hidden)),) = tensors
        share = padded_vocab_size(spec) // size
        start, end = rank * share, min(rows, (rank + 1) * share)
        return [Piece(name, ((start, end), (0, hidden)), (0, 0))] if start < end else []


# Relation between one parameter and one or more Hugging Face tensors: the parameter's ``shape`` on
# each of ``size`` tensor ranks, and a rank's ``pieces`` of the tensors.
Operator = Plain | Stacked | VocabularyRows


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """A parameter of a model chunk on one tensor rank, and its pieces of tensors."""

    name: str  # in the chunk
    shape: Shape
    tensors: tuple[tuple[str, Shape], ...]  # names and whole shapes of the Hugging Face tensors
    pieces: tuple[Piece, ...]

    @property
    def is_whole(self) -> bool:
        """Whether the pieces are all of it: it has no padding."""
        return sum(prod(extents(piece.box)) for piece in self.pieces) == prod(self.shape)


@dataclass(frozen=True)
class Rule:
    """Mapping of Hugging Face tensors to one parameter.

    ``shapes`` computes the tensors' shapes. ``fused`` is the parameter's name where the layer spec
    fuses the norm into the linear that follows it (Transformer Engine). ``file_tensor`` names the
    one tensor that stores all of ``hf`` in files, their rows stacked in order.
    """

    hf: tuple[str, ...]
    megatron: str
    operator: Operator
    shapes: Callable[[ModelSpec], tuple[Shape, ...]]
    fused: str | None = None
    file_tensor: str | None = None

    def parameter(self, spec: ModelSpec, name: str, prefix: str, size: int, rank: int) -> Parameter:
        """The parameter ``name`` on a tensor rank; ``prefix`` goes before the tensors' names."""
        return Parameter(
            name=name,
            shape=self.operator.shape(spec, self.shapes(spec), size),
            tensors=self.tensors(spec, prefix),
            pieces=tuple(
                Piece(f"{prefix}{piece.tensor}", piece.box, piece.start)
                for piece in _pieces_of(self, spec, size, rank)
            ),
        )

    def tensors(self, spec: ModelSpec, prefix: str) -> tuple[tuple[str, Shape], ...]:
        """Names and whole shapes of the Hugging Face tensors."""
        return tuple(zip((f"{prefix}{name}" for name in self.hf), self.shapes(spec), strict=True))


@lru_cache(maxsize=4096)
def _pieces_of(rule: Rule, spec: ModelSpec, size: int, rank: int) -> tuple[Piece, ...]:
    """Pieces of a parameter, without the prefix of names: equal in all layers, so cached."""
    return tuple(rule.operator.pieces(spec, rule.tensors(spec, ""), size, rank))


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
    Stacked(by_query_group=True),
    lambda spec: tuple((rows, spec.hidden_size) for rows in _qkv_rows(spec)),
)
QKV_BIAS = Rule(
    ("self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias"),
    "self_attention.linear_qkv.bias",
    Stacked(by_query_group=True),
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
    Stacked(),
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

# By target: the parameter's module, and the rule of its weight, whose outputs or inputs are cut.
_ADAPTED = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj"), ("self_attention", QKV_WEIGHT)),
    "o_proj": ("self_attention", ATTENTION_OUTPUT),
    **dict.fromkeys(("gate_proj", "up_proj"), ("mlp", GATE_UP)),
    "down_proj": ("mlp", DOWN),
}
assert {*_ADAPTED} == {*LORA_TARGETS}


@cache
def adapter_rules(target: str) -> tuple[Rule, Rule]:
    """Rules of a target's adapter, ``A`` and ``B``, under PEFT's names.

    If tensor ranks cut the layer's outputs, ``B`` is cut in the same way and ``A`` replicated; if
    they cut its inputs, ``A`` is cut and ``B`` replicated.
    """
    module, rule = _ADAPTED[target]
    (name,) = (name for name in rule.hf if name.split(".")[-2] == target)
    place, stem = rule.hf.index(name), name.removesuffix(".weight")
    cuts_inputs = rule.operator == Plain(dim=1)

    def inputs(spec: ModelSpec) -> tuple[Shape, ...]:
        assert spec.lora is not None
        return ((spec.lora.r, rule.shapes(spec)[place][1]),)

    def outputs(spec: ModelSpec) -> tuple[Shape, ...]:
        assert spec.lora is not None
        return ((rule.shapes(spec)[place][0], spec.lora.r),)

    a, b = (f"{module}.lora.{target}.{letter}" for letter in "AB")
    return (
        Rule((f"{stem}.lora_A.weight",), a, Plain(1 if cuts_inputs else None), inputs),
        Rule((f"{stem}.lora_B.weight",), b, Plain(None if cuts_inputs else 0), outputs),
    )


# A layer without biases and without norms inside attention.
PLAIN_LAYER = (INPUT_NORM, QKV_WEIGHT, ATTENTION_OUTPUT, MLP_NORM, GATE_UP, DOWN)


def _adapters_of(module: str) -> Iterator[str]:
    """Parameters of the adapters in a module, in order."""
    for target, (where, _) in _ADAPTED.items():
        if where == module:
            yield from (rule.megatron for rule in adapter_rules(target))


# A layer's parameters in the order of Megatron-core's modules: Attention creates the output
# projection before its subclass SelfAttention creates the rest, and Transformer Engine's linear
# layers have their norm first.
LAYER_ORDER = (
    "input_layernorm.weight",
    "self_attention.linear_proj.weight",
    "self_attention.linear_qkv.layer_norm_weight",
    "self_attention.linear_qkv.weight",
    "self_attention.linear_qkv.bias",
    "self_attention.q_layernorm.weight",
    "self_attention.k_layernorm.weight",
    *_adapters_of("self_attention"),
    "pre_mlp_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight",
    "mlp.linear_fc1.weight",
    "mlp.linear_fc2.weight",
    *_adapters_of("mlp"),
)
