"""Place of every number of a checkpoint: one, but for replicas, under any plan."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from math import prod

import numpy as np
import pytest

from puzzle_align.layout.families import FAMILIES
from puzzle_align.layout.hf_config import from_hf_config
from puzzle_align.layout.model import ModelSpec, with_scalar_head
from puzzle_align.layout.plan import ParallelPlan
from puzzle_align.layout.rules import Parameter, extents
from puzzle_align.layout.weights import num_parameters, parameter_boxes, tensor_shapes

CONFIG = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 5,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 6,
    "vocab_size": 150,  # stored as 256 rows: the last of four tensor ranks has padding alone
    "max_position_embeddings": 64,
}
MODELS = {
    **{name: from_hf_config({**CONFIG, "model_type": name}, "") for name in FAMILIES},
    "tied": from_hf_config({**CONFIG, "model_type": "qwen2", "tie_word_embeddings": True}, ""),
    "scalar": with_scalar_head(from_hf_config({**CONFIG, "model_type": "qwen3"}, "")),
}
PLANS = {
    "one": ParallelPlan(),
    "tensor": ParallelPlan(tensor=4),
    "pipeline": ParallelPlan(pipeline=5),
    "uneven": ParallelPlan(pipeline=2, tensor=2, pipeline_layers=(3, 2)),
    "chunks": ParallelPlan(
        pipeline=2,
        tensor=2,
        virtual_pipeline=2,
        sequence_parallel=True,
        pipeline_layers=(1, 1, 2, 1),
    ),
}


def held(spec: ModelSpec, plan: ParallelPlan) -> Iterator[tuple[int, int, Parameter]]:
    """Position, tensor rank and parameter, of all there are."""
    for position in range(plan.num_positions):
        for rank in range(plan.tensor):
            for parameter in parameter_boxes(spec, plan, position, rank).values():
                yield position, rank, parameter


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
@pytest.mark.parametrize("spec", MODELS.values(), ids=MODELS)
def test_every_number_lies_in_one_box(spec: ModelSpec, plan: ParallelPlan) -> None:
    boxes: dict[str, Counter] = {name: Counter() for name in tensor_shapes(spec)}
    for _, _, parameter in held(spec, plan):
        boxes |= {name: boxes[name] for name, _ in parameter.tensors}  # no others than these
        for piece in parameter.pieces:
            boxes[piece.tensor][piece.box] += 1
    tied = spec.tie_word_embeddings and plan.num_positions > 1
    for name, shape in tensor_shapes(spec).items():
        covered = np.zeros(shape, dtype=np.int64)
        for box in boxes[name]:
            covered[tuple(slice(*span) for span in box)] += 1
        assert (covered == 1).all(), name
        on_all_ranks = (len(shape) == 1 and not name.endswith(".bias")) or name == "score.weight"
        copies = plan.tensor if on_all_ranks else 2 if tied and "embed" in name else 1
        assert set(boxes[name].values()) == {copies}, name


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
@pytest.mark.parametrize("spec", MODELS.values(), ids=MODELS)
def test_pieces_fill_their_parameter_but_for_padding(spec: ModelSpec, plan: ParallelPlan) -> None:
    for _, rank, parameter in held(spec, plan):
        filled = np.zeros(parameter.shape, dtype=np.int64)
        for piece in parameter.pieces:
            place = filled[tuple(slice(*span) for span in piece.place)]
            assert place.shape == extents(piece.box)
            place += 1
        rows = len(filled)
        if parameter.tensors[0][1][0] == spec.vocab_size:
            rows = max(0, min(rows, spec.vocab_size - rank * rows))
        assert (filled[:rows] == 1).all() and (filled[rows:] == 0).all(), parameter.name


def test_parameters_are_counted_as_they_lie() -> None:
    for spec in MODELS.values():
        pieces = [p for _, _, parameter in held(spec, ParallelPlan()) for p in parameter.pieces]
        assert sum(prod(extents(piece.box)) for piece in pieces) == num_parameters(spec)


def test_query_groups_are_pieces_in_turn() -> None:
    spec = replace(MODELS["qwen2"], head_dim=1)  # two queries a group
    name = "decoder.layers.0.self_attention.linear_qkv.bias"
    bias = parameter_boxes(spec, ParallelPlan(tensor=2), 0, 1)[name]
    q, k, v = (f"model.layers.0.self_attn.{x}_proj.bias" for x in "qkv")
    assert [(piece.tensor, piece.box[0], piece.start[0]) for piece in bias.pieces] == [
        (q, (4, 6), 0),
        (k, (2, 3), 2),
        (v, (2, 3), 3),
        (q, (6, 8), 4),
        (k, (3, 4), 6),
        (v, (3, 4), 7),
    ]


def test_gate_and_up_are_cut_by_themselves() -> None:
    plan, name = ParallelPlan(tensor=2), "decoder.layers.0.mlp.linear_fc1.weight"
    pieces = parameter_boxes(MODELS["llama"], plan, 0, 1)[name].pieces
    assert [(piece.box[0], piece.start) for piece in pieces] == [
        ((12, 24), (0, 0)),
        ((12, 24), (12, 0)),
    ]


def test_a_fused_norm_has_the_linear_layers_name() -> None:
    fused = parameter_boxes(MODELS["llama"], ParallelPlan(), 0, 0, fused_norms=True)
    plain = parameter_boxes(MODELS["llama"], ParallelPlan(), 0, 0)
    assert set(fused) - set(plain) == {
        f"decoder.layers.{layer}.{linear}.layer_norm_weight"
        for layer in range(5)
        for linear in ("self_attention.linear_qkv", "mlp.linear_fc1")
    }
    assert {p.pieces for p in fused.values()} == {p.pieces for p in plain.values()}


def test_a_layer_s_parameters_are_in_the_order_of_its_module() -> None:
    """Layers are Transformer Engine's; others are compared with what Megatron-core builds."""
    names = list(parameter_boxes(MODELS["qwen2"], ParallelPlan(), 0, 0, fused_norms=True))
    layer = "decoder.layers.4."
    assert [name.removeprefix(layer) for name in names if name.startswith(layer)] == [
        "self_attention.linear_proj.weight",
        "self_attention.linear_qkv.layer_norm_weight",
        "self_attention.linear_qkv.weight",
        "self_attention.linear_qkv.bias",
        "mlp.linear_fc1.layer_norm_weight",
        "mlp.linear_fc1.weight",
        "mlp.linear_fc2.weight",
    ]
    layers = [int(name.split(".")[2]) for name in names if name.startswith("decoder.layers.")]
    assert layers == sorted(layers)
    assert names[0] == "embedding.word_embeddings.weight"
    assert names[-2:] == ["decoder.final_layernorm.weight", "output_layer.weight"]
