"""SwiGLU: the values and gradients of the separate operations, and what it keeps."""

import pytest
import torch
import torch.nn.functional as F

from puzzle_align.models.swiglu import swiglu


def _separate(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_value_and_gradient_are_bitwise_those_of_the_separate_operations(dtype):
    torch.manual_seed(0)
    gate_up = (3 * torch.randn(37, 1, 2 * 48)).to(dtype)
    grad_output = torch.randn(37, 1, 48).to(dtype)
    results = []
    for function in (swiglu, _separate):
        leaf = gate_up.clone().requires_grad_()
        output = function(leaf)
        output.backward(grad_output)
        results.append((output.detach(), leaf.grad))
    (output, grad), (wanted_output, wanted_grad) = results
    assert torch.equal(output, wanted_output)
    assert torch.equal(grad, wanted_grad)


def test_gradient_is_that_of_finite_differences():
    torch.manual_seed(1)
    gate_up = torch.randn(3, 1, 8, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(swiglu, gate_up)


def test_keeps_its_input_alone():
    gate_up = torch.randn(5, 1, 8, requires_grad=True)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        swiglu(gate_up)
    assert [t.data_ptr() for t in kept] == [gate_up.data_ptr()]
