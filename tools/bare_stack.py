"""A DPO step in plain PyTorch, on the rows that our steps take: a report compares both.

The model is a Llama as one would write it, its parameters named as in Hugging Face's files. Rows,
their masks and indices come from our loader, so that both layouts run on the same pairs; the rest
is torch's. On CUDA attention is FlexAttention, compiled as are the element-wise operations; on a
CPU, where that has no backward, it is ``scaled_dot_product_attention`` with a mask.

It does less than ours: gradients and AdamW's moments are as precise as the weights, bf16 on CUDA,
and there are no main weights in float32.

Shapes: S tokens in a row, H hidden size, h query heads, g query groups, d channels a head, N
predictions.
"""

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from dpo_steps import draw_weights
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.utils.checkpoint import checkpoint

from puzzle_align.config.sections.optimizer import OptimizerConfig
from puzzle_align.config.sections.preference import DPOConfig
from puzzle_align.layout.model import AttentionBackend, ModelSpec, Recompute
from puzzle_align.runtime.moments import now
from puzzle_align.runtime.row_input import RowInput


class Layer(nn.Module):
    """RMSNorm, grouped attention, RMSNorm, SwiGLU."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        hidden, inner = spec.hidden_size, spec.intermediate_size
        queries = spec.num_attention_heads * spec.head_dim
        keys = spec.num_key_value_heads * spec.head_dim
        linear = partial(nn.Linear, bias=False)
        self.head_dim = spec.head_dim
        self.input_layernorm = nn.RMSNorm(hidden, spec.rms_norm_eps)
        self.self_attn = nn.ModuleDict(
            {"q_proj": linear(hidden, queries), "k_proj": linear(hidden, keys)}
            | {"v_proj": linear(hidden, keys), "o_proj": linear(queries, hidden)}
        )
        self.post_attention_layernorm = nn.RMSNorm(hidden, spec.rms_norm_eps)
        self.mlp = nn.ModuleDict(
            {"gate_proj": linear(hidden, inner), "up_proj": linear(hidden, inner)}
            | {"down_proj": linear(inner, hidden)}
        )

    def forward(self, hidden: Tensor, angles: Tensor, mask: Any) -> Tensor:
        """Hidden states [S, H] after the layer; ``angles`` [S, 1, d]."""
        x = self.input_layernorm(hidden)
        q, k, v = (
            self.self_attn[f"{name}_proj"](x).unflatten(-1, (-1, self.head_dim)) for name in "qkv"
        )
        rotate = _compiled(_rotated, x.is_cuda)
        output = _attend(rotate(q, angles), rotate(k, angles), v, mask)
        hidden = hidden + self.self_attn["o_proj"](output.flatten(1))
        x = self.post_attention_layernorm(hidden)
        gated = _compiled(_gated, x.is_cuda)(self.mlp["gate_proj"](x), self.mlp["up_proj"](x))
        return hidden + self.mlp["down_proj"](gated)


class Llama(nn.Module):
    """A Llama that returns the log-probabilities of a row's responses."""

    def __init__(self, spec: ModelSpec, recompute: Recompute) -> None:
        super().__init__()
        assert spec.rope_scaling is None and not spec.tie_word_embeddings
        layers = nn.ModuleList(Layer(spec) for _ in range(spec.num_hidden_layers))
        norm = nn.RMSNorm(spec.hidden_size, spec.rms_norm_eps)
        embedding = nn.Embedding(spec.vocab_size, spec.hidden_size)
        self.model = nn.ModuleDict({"embed_tokens": embedding, "layers": layers, "norm": norm})
        self.lm_head = nn.Linear(spec.hidden_size, spec.vocab_size, bias=False)
        self.spec, self.recompute = spec, recompute

    def forward(self, row: RowInput) -> Tensor:
        """Summed log-probabilities of the row's responses [B, K], in float32."""
        channels = torch.arange(0, self.spec.head_dim, 2, device=row.tokens.device)
        inverse = self.spec.rope_theta ** (-channels / self.spec.head_dim)
        angles = (row.position_ids[0][:, None] * inverse).repeat(1, 2)[:, None]
        hidden = self.model["embed_tokens"](row.tokens[0])
        for layer in self.model["layers"].children():
            again = self.recompute == "full" and torch.is_grad_enabled()
            run = partial(checkpoint, layer, use_reentrant=False) if again else layer
            hidden = run(hidden, angles, row.attention.structure)
        predicting = self.model["norm"](hidden)[row.predictions.predict_from]
        targets = row.predictions.targets
        assert targets is not None
        values = -F.cross_entropy(self.lm_head(predicting).float(), targets, reduction="none")
        return (
            values.new_zeros(row.lengths.numel())
            .index_add(0, row.cells, values)
            .view_as(row.lengths)
        )


class BareStack:
    """Policy, reference of the same random weights, and AdamW: a ``Stack`` of ``dpo_steps``."""

    def __init__(
        self,
        spec: ModelSpec,
        device: torch.device,
        recompute: Recompute,
        config: OptimizerConfig = OptimizerConfig(),  # noqa: B008 - frozen
    ) -> None:
        """Draw the weights: bf16 on CUDA, else float32."""
        self.spec, self.device, self.config = spec, device, config
        self.attention: AttentionBackend = "flex" if device.type == "cuda" else "dense"
        self.reference = _random(spec, recompute, device).requires_grad_(False)
        self.policy = _random(spec, recompute, device)
        self.optimizer = torch.optim.AdamW(
            self.policy.parameters(),
            lr=config.lr,
            betas=(config.adam_beta1, config.adam_beta2),
            eps=config.adam_eps,
            weight_decay=0.0,  # as by default in ours
            fused=True,
        )

    def now(self) -> float:
        """Seconds, after the device's queued work is done."""
        return now(self.device)

    def reference_outputs(
        self, rows: Sequence[RowInput], num_examples: int, num_responses: int
    ) -> Tensor:
        """Compute the reference's log-probabilities of all responses [B, K]."""
        return outputs_of(self.reference, rows, num_examples, num_responses)

    def train(self, rows: Sequence[RowInput], reference: Tensor) -> None:
        """Compute the policy's gradients of the mean loss over all pairs, anew."""
        self.optimizer.zero_grad()
        for row in rows:
            (dpo_loss(self.policy(row), reference[row.examples]) / len(reference)).backward()

    def update(self) -> None:
        """Clip the gradients and step the optimizer."""
        nn.utils.clip_grad_norm_(self.policy.parameters(), self.config.max_grad_norm)
        self.optimizer.step()


@torch.no_grad()
def outputs_of(
    model: Llama, rows: Sequence[RowInput], num_examples: int, num_responses: int
) -> Tensor:
    """A model's log-probabilities of all responses [B, K]."""
    table = torch.zeros(num_examples, num_responses, device=rows[0].tokens.device)
    for row in rows:
        table[row.examples] = model(row)
    return table


def dpo_loss(outputs: Tensor, reference: Tensor) -> Tensor:
    """Sum of the sigmoid DPO losses of pairs, from log-probabilities [B, 2]."""
    chosen, rejected = (outputs - reference).unbind(1)
    return -F.logsigmoid(DPOConfig().beta * (chosen - rejected)).sum()


def _random(spec: ModelSpec, recompute: Recompute, device: torch.device) -> Llama:
    """A model on the device, its random weights drawn there."""
    with torch.device("meta"):
        model = Llama(spec, recompute)
    model = model.to(torch.bfloat16 if device.type == "cuda" else torch.float32)
    model = model.to_empty(device=device)
    draw_weights(model, spec.initializer_range)
    return model


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask | Tensor) -> Tensor:
    """q [S, h, d], k and v [S, g, d] -> [S, h, d]; ``mask`` of FlexAttention, or bool [S, S]."""
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    if isinstance(mask, BlockMask):
        attend = _compiled(flex_attention, q.is_cuda)
        output = attend(q, k, v, block_mask=mask, enable_gqa=True)
    else:
        output = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    return output[0].transpose(0, 1)


def _rotated(x: Tensor, angles: Tensor) -> Tensor:
    """Rotate channel i and channel i + d/2 of every head by the position's angle."""
    first, second = x.chunk(2, dim=-1)
    turned = x * angles.cos() + torch.cat((-second, first), dim=-1) * angles.sin()
    return turned.to(x.dtype)


def _gated(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


@cache
def _compiled(function: Callable[..., Tensor], on_cuda: bool) -> Callable[..., Tensor]:
    return torch.compile(function, dynamic=False, fullgraph=True) if on_cuda else function
