"""Replacements of parts of Megatron-core's layers: norm, gated activation, residual, rotary.

Shapes: S tokens in a row, H hidden, F the MLP's width on this tensor rank, R rotated channels of a
head.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from puzzle_align.layout.model import Activation, ModelSpec, RopeScaling, rotary_channels
from puzzle_align.models.cpu import engine_device


class RMSNorm(nn.Module):
    """RMSNorm over the last dimension, for layers without Transformer Engine.

    Megatron's wrapper of torch's norm refuses sequence parallelism. This one marks its weight, and
    Megatron then sums the weight's gradients, which are partial on each tensor rank.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps
        self.adds_one = config.layernorm_zero_centered_gamma
        weight = torch.ones(hidden_size, dtype=config.params_dtype, device=engine_device())
        self.weight = nn.Parameter(weight)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, hidden: Tensor) -> Tensor:
        """Normalise ``hidden`` ``[..., hidden_size]``."""
        hidden = hidden.contiguous()  # saved for the backward; a view would keep what it is part of
        if self.adds_one:
            return _NormOfOnePlusWeight.apply(hidden, self.weight, self.eps)
        return F.rms_norm(hidden, hidden.shape[-1:], self.weight, self.eps)


class _NormOfOnePlusWeight(torch.autograd.Function):
    """RMSNorm times 1 + weight, in float32; saves only its input and the rows' scales."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = hidden.to(torch.promote_types(hidden.dtype, torch.float32))
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(hidden, weight, scale)
        return (wide * scale * (1 + weight.to(wide.dtype))).to(hidden.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, Tensor, None]:
        hidden, weight, scale = ctx.saved_tensors
        grad, normed = grad_output.to(scale.dtype), hidden.to(scale.dtype) * scale
        grad_weight = (grad * normed).flatten(0, -2).sum(0).to(weight.dtype)
        grad = grad * (1 + weight.to(scale.dtype))
        grad = scale * (grad - normed * (grad * normed).mean(-1, keepdim=True))
        return grad.to(hidden.dtype), grad_weight, None


class _Gated(torch.autograd.Function):
    """Gated activation as one autograd function that saves only its input.

    In separate operations (Megatron's unfused path) autograd would also save the activated gate and
    a copy of ``up``: five widths of the MLP instead of three, the product included, which the next
    projection saves. The results are bitwise the same.
    """

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, activation: Activation) -> Tensor:
        ctx.save_for_backward(gate_up)
        ctx.activation = activation
        gate, up = gate_up.chunk(2, dim=-1)
        if activation == "silu":
            return F.silu(gate).mul_(up)
        return F.gelu(gate, approximate="tanh").mul_(up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None]:
        """Compute in the result's memory: no other tensor of its size is allocated."""
        (gate_up,), aten = ctx.saved_tensors, torch.ops.aten
        gate, up = gate_up.chunk(2, dim=-1)
        grad = torch.empty_like(gate_up)
        grad_gate, grad_up = grad.chunk(2, dim=-1)
        if ctx.activation == "silu":
            aten.silu.out(gate, out=grad_up)
        else:
            aten.gelu.out(gate, approximate="tanh", out=grad_up)
        grad_up.mul_(grad_output)
        torch.mul(grad_output, up, out=grad_gate)
        if ctx.activation == "silu":
            aten.silu_backward.grad_input(grad_gate, gate, grad_input=grad_gate)
        else:
            aten.gelu_backward.grad_input(grad_gate, gate, approximate="tanh", grad_input=grad_gate)
        return grad, None


class _GatedByTE(torch.autograd.Function):
    """The same in a kernel of Transformer Engine each way; it saves only its input, too."""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, activation: Activation) -> Tensor:
        import transformer_engine_torch as te  # pyright: ignore[reportMissingImports] - optional

        forward, ctx.backward_kernel = {
            "silu": (te.swiglu, te.dswiglu),
            "gelu_tanh": (te.geglu, te.dgeglu),
        }[activation]
        ctx.save_for_backward(gate_up)
        return forward(gate_up, None)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None]:
        (gate_up,) = ctx.saved_tensors
        return ctx.backward_kernel(grad_output.contiguous(), gate_up, None), None


class SwiGLU(nn.Module):
    """``silu(gate) * up``, a module as Megatron's MLP builds and saves it."""

    activation: Activation = "silu"
    function: type[torch.autograd.Function] = _Gated

    def __init__(self, config: TransformerConfig | None = None) -> None:
        super().__init__()

    def sharded_state_dict(self, *_args: Any, **_named: Any) -> dict[str, Any]:
        """Return the state that a checkpoint takes: none."""
        return {}

    def forward(self, gate_up: Tensor) -> Tensor:
        """Return ``[..., F]`` of ``gate_up`` ``[..., 2F]``, the gate first."""
        return self.function.apply(gate_up, self.activation)


class GeGLU(SwiGLU):
    """``gelu(gate) * up``, with GELU's tanh approximation."""

    activation = "gelu_tanh"


class FusedSwiGLU(SwiGLU):
    """``SwiGLU`` in Transformer Engine's kernels."""

    function = _GatedByTE


class FusedGeGLU(GeGLU):
    """``GeGLU`` in Transformer Engine's kernels."""

    function = _GatedByTE


# By activation: our module, and Megatron's activation function.
ACTIVATIONS: dict[Activation, tuple[type[nn.Module], Callable[..., Tensor]]] = {
    "silu": (SwiGLU, F.silu),
    "gelu_tanh": (GeGLU, F.gelu),
}
FUSED_ACTIVATIONS: dict[Activation, type[nn.Module]] = {
    "silu": FusedSwiGLU,
    "gelu_tanh": FusedGeGLU,
}


def residual_sum(multiplier: float) -> Callable[..., Any]:
    """Make Megatron's bias-dropout-add: residual plus ``multiplier`` times a block's output."""
    if multiplier == 1:
        return get_bias_dropout_add

    def bias_dropout_add(_training: bool, _is_fused: bool) -> Callable[..., Tensor]:
        return scaled_add

    def scaled_add(
        output_and_bias: tuple[Tensor, Tensor | None], residual: Tensor, _dropout: float
    ) -> Tensor:
        output, bias = output_and_bias
        assert bias is None, "blocks have no output bias"
        return torch.add(residual, output, alpha=multiplier)

    return bias_dropout_add


def inverse_frequencies(spec: ModelSpec) -> Tensor:
    """Angle per position of every rotated pair of channels, float32 ``[R/2]``, on the CPU."""
    channels = rotary_channels(spec)
    exponents = torch.arange(0, channels, 2, dtype=torch.float32) / channels
    inverse = 1.0 / (spec.rope_theta**exponents)
    return inverse if spec.rope_scaling is None else _llama3_scaled(inverse, spec.rope_scaling)


def rotary_angles(position_ids: Tensor, inverse: Tensor) -> Tensor:
    """Angles ``[S, 1, 1, R]`` for Megatron's attention from ``position_ids`` ``[1, S]``.

    They follow ``position_ids``, not places in the row: positions restart inside packed rows.
    """
    angles = position_ids[0].to(torch.float32)[:, None] * inverse
    return torch.cat((angles, angles), dim=-1)[:, None, None, :]


def _llama3_scaled(inverse: Tensor, scaling: RopeScaling) -> Tensor:
    """Scale as Llama 3: stretch long wavelengths by ``factor``, keep short ones, blend between."""
    original = scaling.original_max_position_embeddings
    wavelengths = 2 * math.pi / inverse
    longest_kept = original / scaling.high_freq_factor
    shortest_stretched = original / scaling.low_freq_factor
    kept_share = (original / wavelengths - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    blended = (1 - kept_share) * inverse / scaling.factor + kept_share * inverse
    stretched = torch.where(wavelengths > shortest_stretched, inverse / scaling.factor, blended)
    return torch.where(wavelengths < longest_kept, inverse, stretched)
