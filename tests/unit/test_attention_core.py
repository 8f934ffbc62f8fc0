"""The core attention inside Megatron: shapes as Megatron's, the row out of band."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn
from torch.utils.checkpoint import checkpoint

from puzzle_align.layout.rows import RowLayout, Segment
from puzzle_align.models.attention import attend, prepare_attention
from puzzle_align.models.attention.core_attention import (
    PackedCoreAttention,
    RowState,
    bind_row_state,
)

CPU = torch.device("cpu")
LAYOUT = RowLayout(32, (Segment(0, 5, (6, 7)), Segment(20, 2, (3,))))
GROUPS = SimpleNamespace(tp=None)  # of a ProcessGroupCollection, what the module reads


def build_core(softmax_scale: float | None = None, **config: Any) -> PackedCoreAttention:
    sizes = {"num_layers": 1, "hidden_size": 32, "num_attention_heads": 4, "num_query_groups": 2}
    settings = {"attention_dropout": 0.0, **sizes, **config}
    return PackedCoreAttention(
        config=TransformerConfig(**settings),
        layer_number=1,
        attn_mask_type=AttnMaskType.causal,
        attention_type="self",
        softmax_scale=softmax_scale,
        pg_collection=GROUPS,  # pyright: ignore[reportArgumentType]
    )


def random_qkv() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(32, 1, heads, 8, generator=generator).requires_grad_() for heads in (4, 2, 2)
    ]


@pytest.mark.parametrize("scale", [None, 0.2])
def test_takes_and_gives_megatrons_shapes(scale: float | None) -> None:
    core, row_state = build_core(scale), RowState()
    bind_row_state(core, row_state)
    row_state.current = prepare_attention(LAYOUT, "segments", CPU)
    q, k, v = random_qkv()
    output = core(q, k, v, None, attn_mask_type=None, attention_bias=None, packed_seq_params=None)
    q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))
    expected = attend(q, k, v, row_state.current, scale)
    assert torch.equal(output, expected.permute(2, 0, 1, 3).reshape(32, 1, 32))


def test_one_row_state_serves_every_layer_and_follows_the_microbatch() -> None:
    layers, row_state = nn.ModuleList([build_core(), build_core()]), RowState()
    bind_row_state(layers, row_state)
    outputs = []
    for layout in (LAYOUT, RowLayout(32, (Segment(0, 30, (1, 1)),))):
        row_state.current = prepare_attention(layout, "segments", CPU)
        first, second = (layer(*random_qkv()) for layer in layers)
        assert torch.equal(first, second)
        outputs.append(first)
    assert not torch.allclose(*outputs)


def test_recompute_reads_the_row_again() -> None:
    core, row_state = build_core(), RowState()
    bind_row_state(core, row_state)
    row_state.current = prepare_attention(LAYOUT, "segments", CPU)
    inputs = random_qkv()
    expected = torch.autograd.grad(core(*inputs).square().sum(), inputs)
    loss = checkpoint(core, *inputs, use_reentrant=False).square().sum()
    row_state.current = prepare_attention(RowLayout(32, ()), "segments", CPU)  # the next row
    row_state.current = prepare_attention(LAYOUT, "segments", CPU)
    for mine, theirs in zip(torch.autograd.grad(loss, inputs), expected, strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("bound", [False, True])
def test_a_forward_needs_a_row(bound: bool) -> None:
    core = build_core()
    if bound:
        bind_row_state(core, RowState())
    with pytest.raises(AssertionError, match=r"set row_state.current before every forward"):
        core(*random_qkv())


@pytest.mark.parametrize(
    "name, value",
    [
        ("attention_dropout", 0.1),
        ("window_size", (4096, 0)),
        ("softmax_type", "learnable"),
        ("apply_query_key_layer_scaling", True),
    ],
)
def test_refuses_what_it_does_not_compute(name: str, value: Any) -> None:
    with pytest.raises(AssertionError):
        build_core(**{name: value})
