"""Which box of which Hugging Face tensor every rank's parameters hold.

Invariants (the tests assert them):
- a chunk's parameters have the names and shapes that Megatron-core builds, and ``parameter_boxes``
  gives them in the order of its module, which its gradient buffers and optimizers follow;
- the pieces of all positions and tensor ranks cover every tensor of the checkpoint; two pieces of
  one tensor are the same box, which is then replicated, or have nothing in common;
- the pieces of a parameter do not overlap, and fill it but for the vocabulary's padding.

Replicated are: what tensor ranks do not share (norms, a scalar head), and a tied embedding, which
is on the first and on the last position.
"""

import re
from collections.abc import Iterator
from math import inf

from puzzle_align.layout import rules
from puzzle_align.layout.families import FAMILIES
from puzzle_align.layout.model import ModelSpec
from puzzle_align.layout.plan import ParallelPlan
from puzzle_align.layout.rules import Parameter, Rule, Shape


def hf_shapes(spec: ModelSpec) -> dict[str, Shape]:
    """Name and shape of every tensor of the model's Hugging Face checkpoint, in file order."""
    everything = range(spec.num_hidden_layers)
    return {
        name: shape
        for rule, _, prefix in _rules_of(spec, everything, is_first=True, is_last=True)
        for name, shape in rule.tensors(spec, prefix)
    }


def parameter_boxes(
    spec: ModelSpec,
    plan: ParallelPlan,
    position: int,
    tensor_rank: int,
    *,
    fused_norms: bool = False,
) -> dict[str, Parameter]:
    """By name, the parameters of the chunk at a virtual position of the plan, on one tensor rank.

    They are in the order of the built module. ``fused_norms``: the layers are Transformer Engine's.
    The plan must divide the model (``layout.divisibility``).
    """
    made = chunk_parameters(
        spec,
        plan.layers_of(position, spec.num_hidden_layers),
        is_first=position == 0,
        is_last=position == plan.num_positions - 1,
        tensor_size=plan.tensor,
        tensor_rank=tensor_rank,
        fused_norms=fused_norms,
    )
    return {parameter.name: parameter for parameter in sorted(made, key=_place_in_module)}


def chunk_parameters(
    spec: ModelSpec,
    layers: range,
    *,
    is_first: bool,
    is_last: bool,
    tensor_size: int = 1,
    tensor_rank: int = 0,
    fused_norms: bool = False,
) -> Iterator[Parameter]:
    """The parameters of a chunk of these layers, with embedding or head, on one tensor rank."""

    for rule, name, prefix in _rules_of(
        spec, layers, is_first=is_first, is_last=is_last, fused_norms=fused_norms
    ):
        yield rule.parameter(spec, name, prefix, tensor_size, tensor_rank)


def layer_parameters(spec: ModelSpec, tensor_size: int, tensor_rank: int) -> list[Parameter]:
    """The parameters of any layer on one tensor rank: the names are without the layer's prefix."""
    layer_rules = FAMILIES[spec.model_type].layer_rules
    return [
        rule.parameter(spec, rule.megatron, "", tensor_size, tensor_rank) for rule in layer_rules
    ]


def layer_prefix(layer: int) -> str:
    """What the names of a layer's tensors begin with."""
    return f"model.layers.{layer}."


def _rules_of(
    spec: ModelSpec, layers: range, *, is_first: bool, is_last: bool, fused_norms: bool = False
) -> Iterator[tuple[Rule, str, str]]:
    """Of every parameter of a chunk its rule, its name and the prefix of its tensors."""
    if is_first:
        yield rules.EMBEDDING, rules.EMBEDDING.megatron, ""
    for index, layer in enumerate(layers):
        for rule in FAMILIES[spec.model_type].layer_rules:
            own = rule.fused if fused_norms and rule.fused is not None else rule.megatron
            yield rule, f"decoder.layers.{index}.{own}", layer_prefix(layer)
    if is_last:
        yield rules.FINAL_NORM, rules.FINAL_NORM.megatron, ""
        if not (spec.tie_word_embeddings and is_first):
            head = _head_rule(spec)
            yield head, head.megatron, ""


def _place_in_module(parameter: Parameter) -> tuple[float, int]:
    """Sorts a chunk's parameters as its module lists them: files have another order in a layer."""
    own = re.fullmatch(r"decoder\.layers\.(\d+)\.(.+)", parameter.name)
    if own is not None:
        return int(own[1]), rules.LAYER_ORDER.index(own[2])
    return (-1, 0) if parameter.name == rules.EMBEDDING.megatron else (inf, 0)


def _head_rule(spec: ModelSpec) -> Rule:
    if spec.head == "scalar":
        return rules.SCALAR_HEAD
    return rules.TIED_HEAD if spec.tie_word_embeddings else rules.HEAD
