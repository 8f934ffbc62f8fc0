"""The boxes of Hugging Face tensors in every rank's parameters.

Tensors have the names that most families' files use. If a family's files store several of them in
one tensor (query, key and value), each of them is a box of rows in it (``file_places``).

Invariants (the tests assert them):
- a chunk's parameters have Megatron-core's names and shapes, and ``parameter_boxes`` returns them
  in module order, which gradient buffers and optimizers follow;
- the pieces of all positions and tensor ranks cover every tensor of the checkpoint; two pieces of
  one tensor are either the same box, replicated, or disjoint;
- the pieces of a parameter do not overlap, and fill it except for the vocabulary's padding.

Tensors that tensor ranks do not cut (norms, a scalar head) are replicated, and so is a tied
embedding, on the first and the last position.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from math import inf, prod

from puzzle_align.layout import rules
from puzzle_align.layout.families import FAMILIES
from puzzle_align.layout.model import ModelSpec, without_adapters
from puzzle_align.layout.plan import ParallelPlan
from puzzle_align.layout.rules import Box, Parameter, Rule, Shape


@dataclass(frozen=True, slots=True)
class FilePlace:
    """A tensor's place in files: a whole tensor, or rows of one that several tensors share."""

    tensor: str
    shape: Shape  # of the files' whole tensor
    first_row: int

    def box(self, box: Box) -> Box:
        """Convert a box of the tensor to a box of the files' tensor."""
        (start, end), *others = box
        return ((start + self.first_row, end + self.first_row), *others)


def tensor_shapes(spec: ModelSpec) -> dict[str, Shape]:
    """Name and shape of every tensor of the model, in the order of its files."""
    return {
        name: shape
        for rule, prefix in _all_rules(spec)
        for name, shape in rule.tensors(spec, prefix)
    }


def file_places(spec: ModelSpec) -> dict[str, FilePlace]:
    """The place of every tensor in the files of the model's Hugging Face checkpoint, in order."""
    places: dict[str, FilePlace] = {}
    for rule, prefix in _all_rules(spec):
        tensors = rule.tensors(spec, prefix)
        if rule.file_tensor is None:
            places |= {name: FilePlace(name, shape, 0) for name, shape in tensors}
            continue
        shape = (sum(shape[0] for _, shape in tensors), *tensors[0][1][1:])
        row = 0
        for name, (rows, *_) in tensors:
            places[name] = FilePlace(f"{prefix}{rule.file_tensor}", shape, row)
            row += rows
    return places


def hf_shapes(spec: ModelSpec) -> dict[str, Shape]:
    """Name and shape of every tensor in the files of the model's Hugging Face checkpoint."""
    return {place.tensor: place.shape for place in file_places(without_adapters(spec)).values()}


def adapter_shapes(spec: ModelSpec) -> dict[str, Shape]:
    """Name and shape of every tensor of the model's adapters, under PEFT's names."""
    base = tensor_shapes(without_adapters(spec))
    return {name: shape for name, shape in tensor_shapes(spec).items() if name not in base}


def num_parameters(spec: ModelSpec) -> int:
    """Parameters of the whole model without its adapters; tied embeddings count once."""
    return sum(map(prod, hf_shapes(spec).values()))


def num_trainable_parameters(spec: ModelSpec) -> int:
    """Parameters of the whole model that training moves: with adapters, these and a scalar head."""
    return sum(prod(shape) for name, shape in tensor_shapes(spec).items() if is_moved(spec, name))


def parameter_boxes(
    spec: ModelSpec,
    plan: ParallelPlan,
    position: int,
    tensor_rank: int,
    *,
    fused_norms: bool = False,
) -> dict[str, Parameter]:
    """Parameters of the chunk at a virtual position, by name, on one tensor rank; in module order.

    ``fused_norms`` is true for Transformer Engine's layers. The plan must divide the model
    (``division_problems``).
    """
    parameters = chunk_parameters(
        spec,
        plan.layers_of(position, spec.num_hidden_layers),
        is_first=position == 0,
        is_last=position == plan.num_positions - 1,
        tensor_size=plan.tensor,
        tensor_rank=tensor_rank,
        fused_norms=fused_norms,
    )
    return {parameter.name: parameter for parameter in sorted(parameters, key=_place_in_module)}


def chunk_parameters(
    spec: ModelSpec,
    layers: range,
    *,
    is_first: bool,
    is_last: bool,
    tensor_size: int,
    tensor_rank: int,
    fused_norms: bool = False,
) -> Iterator[Parameter]:
    """Parameters of a chunk of these layers, with embedding or head, on one tensor rank."""
    for rule, name, prefix in _rules_of(
        spec, layers, is_first=is_first, is_last=is_last, fused_norms=fused_norms
    ):
        yield rule.parameter(spec, name, prefix, tensor_size, tensor_rank)


def layer_parameters(spec: ModelSpec, tensor_size: int, tensor_rank: int) -> list[Parameter]:
    """Parameters of any layer on one tensor rank, their names without the layer's prefix."""
    return [
        rule.parameter(spec, rule.megatron, "", tensor_size, tensor_rank)
        for rule in layer_rules(spec)
    ]


def layer_rules(spec: ModelSpec) -> tuple[Rule, ...]:
    """Rules of a layer's weights in the files' order, then of its adapters."""
    targets = spec.lora.target_modules if spec.lora is not None else ()
    adapters = (rule for target in targets for rule in rules.adapter_rules(target))
    return *FAMILIES[spec.model_type].layer_rules, *adapters


def is_adapter(name: str) -> bool:
    """Whether a chunk's parameter is an adapter's."""
    return ".lora." in name


def is_base(spec: ModelSpec, name: str) -> bool:
    """Whether a chunk's parameter is one of the base: not an adapter's, and no scalar head."""
    is_head = spec.head == "scalar" and name == rules.SCALAR_HEAD.megatron
    return not (is_adapter(name) or is_head)


def is_trained(spec: ModelSpec, name: str) -> bool:
    """Whether training moves a chunk's parameter: with adapters, all but the base's."""
    return spec.lora is None or not is_base(spec, name)


def is_moved(spec: ModelSpec, tensor: str) -> bool:
    """Whether training moves a tensor of the model: with adapters, these and a scalar head."""
    if spec.lora is None or tensor.endswith((".lora_A.weight", ".lora_B.weight")):
        return True
    return spec.head == "scalar" and tensor in rules.SCALAR_HEAD.hf


def layer_prefix(layer: int) -> str:
    """The prefix of the names of a layer's tensors."""
    return f"model.layers.{layer}."


def _all_rules(spec: ModelSpec) -> Iterator[tuple[Rule, str]]:
    """Rule of every parameter of the whole model, and prefix of its tensors."""
    layers = range(spec.num_hidden_layers)
    for rule, _, prefix in _rules_of(spec, layers, is_first=True, is_last=True):
        yield rule, prefix


def _rules_of(
    spec: ModelSpec, layers: range, *, is_first: bool, is_last: bool, fused_norms: bool = False
) -> Iterator[tuple[Rule, str, str]]:
    """Rule, name and prefix of the tensors of every parameter of a chunk."""
    if is_first:
        yield rules.EMBEDDING, rules.EMBEDDING.megatron, ""
    for index, layer in enumerate(layers):
        for rule in layer_rules(spec):
            name = rule.fused if fused_norms and rule.fused is not None else rule.megatron
            yield rule, f"decoder.layers.{index}.{name}", layer_prefix(layer)
    if is_last:
        yield rules.FINAL_NORM, rules.FINAL_NORM.megatron, ""
        if not (spec.tie_word_embeddings and is_first):
            head = _head_rule(spec)
            yield head, head.megatron, ""


def _place_in_module(parameter: Parameter) -> tuple[float, int]:
    """Sort key for a chunk's parameters in module order, which differs from the files' order."""
    match = re.fullmatch(r"decoder\.layers\.(\d+)\.(.+)", parameter.name)
    if match is not None:
        return int(match[1]), rules.LAYER_ORDER.index(match[2])
    return (-1, 0) if parameter.name == rules.EMBEDDING.megatron else (inf, 0)


def _head_rule(spec: ModelSpec) -> Rule:
    if spec.head == "scalar":
        return rules.SCALAR_HEAD
    return rules.TIED_HEAD if spec.tie_word_embeddings else rules.HEAD
