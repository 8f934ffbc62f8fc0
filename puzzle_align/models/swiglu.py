"""SwiGLU as one differentiable function that keeps its input alone for the backward.

Written in separate operations (Megatron's unfused path) it would keep ``silu(gate)`` and a copy of
``up`` besides: of a layer's largest activations, five widths of the MLP instead of three (with
the product, which the next projection keeps). The values are bitwise the same.

Shapes: F the MLP's width on this tensor rank.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable


def swiglu(gate_up: Tensor) -> Tensor:
    """``silu(gate) * up`` ``[..., F]`` of ``gate_up`` ``[..., 2F]``, the gate first."""
    return _SwiGLU.apply(gate_up)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> Tensor:
        """Works inside the result: nothing else as wide is allocated."""
        (gate_up,) = ctx.saved_tensors
        gate, up = gate_up.chunk(2, dim=-1)
        grad = torch.empty_like(gate_up)
        grad_gate, grad_up = grad.chunk(2, dim=-1)
        torch.ops.aten.silu.out(gate, out=grad_up)
        grad_up.mul_(grad_output)
        torch.mul(grad_output, up, out=grad_gate)
        torch.ops.aten.silu_backward.grad_input(grad_gate, gate, grad_input=grad_gate)
        return grad
