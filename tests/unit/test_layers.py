"""Our parts of a layer: the values and gradients of the separate operations, and what they keep."""

from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

from puzzle_align.models import layers
from puzzle_align.models.layers import GeGLU, RMSNorm, SwiGLU, residual_sum
from tests.bounds import fp32_bound


def _separate_swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def _separate_geglu(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh") * up


GATED = {"swiglu": (SwiGLU(), _separate_swiglu), "geglu": (GeGLU(), _separate_geglu)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", GATED)
def test_value_and_gradient_are_bitwise_those_of_the_separate_operations(name, dtype):
    torch.manual_seed(0)
    gate_up = (3 * torch.randn(37, 1, 2 * 48)).to(dtype)
    grad_output = torch.randn(37, 1, 48).to(dtype)
    results = []
    for function in GATED[name]:
        leaf = gate_up.clone().requires_grad_()
        output = function(leaf)
        output.backward(grad_output)
        results.append((output.detach(), leaf.grad))
    (output, grad), (wanted_output, wanted_grad) = results
    assert torch.equal(output, wanted_output)
    assert torch.equal(grad, wanted_grad)


@pytest.mark.parametrize("name", GATED)
def test_gradient_is_that_of_finite_differences(name):
    torch.manual_seed(1)
    gate_up = torch.randn(3, 1, 8, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(GATED[name][0], gate_up)


@pytest.mark.parametrize("name", GATED)
def test_keeps_its_input_alone(name):
    gate_up = torch.randn(5, 1, 8, requires_grad=True)
    kept = _kept(lambda: GATED[name][0](gate_up))
    assert [t.data_ptr() for t in kept] == [gate_up.data_ptr()]


def _kept(function: Any) -> list[torch.Tensor]:
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        function()
    return kept


def _norm(adds_one: bool, dtype: torch.dtype) -> RMSNorm:
    class Config:
        layernorm_zero_centered_gamma = adds_one
        params_dtype = dtype
        sequence_parallel = False

    with mock.patch.object(layers, "engine_device", lambda: torch.device("cpu")):
        norm = RMSNorm(Config(), 8, eps=1e-3)  # type: ignore[arg-type]
    torch.manual_seed(2)
    torch.nn.init.normal_(norm.weight, std=0.5)
    return norm


def test_a_norm_of_one_plus_weight_is_the_norm_of_a_weight_larger_by_one():
    plain, offset = (_norm(adds_one, torch.float32) for adds_one in (False, True))
    with torch.no_grad():
        plain.weight.copy_(offset.weight + 1)
    hidden, grad_output = torch.randn(2, 9, 1, 8).unbind()
    results = []
    for norm in (plain, offset):
        leaf = hidden.clone().requires_grad_()
        output = norm(leaf)
        output.backward(grad_output)
        results.append((output, leaf.grad, norm.weight.grad))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=10 * fp32_bound(8))


def test_a_norm_of_one_plus_weight_has_the_gradient_of_finite_differences():
    norm = _norm(True, torch.float64)
    hidden = torch.randn(3, 1, 8, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(norm, hidden)
    weight = norm.weight
    assert torch.autograd.gradcheck(
        lambda value: torch.func.functional_call(norm, {"weight": value}, hidden),
        weight.detach().clone().requires_grad_(),
    )


def test_a_norm_of_one_plus_weight_rounds_once_and_keeps_its_input_and_scales():
    norm = _norm(True, torch.bfloat16)
    hidden = torch.randn(5, 1, 8).bfloat16().requires_grad_()
    outputs = []
    kept = _kept(lambda: outputs.append(norm(hidden)))
    wide = [x.detach().float().requires_grad_() for x in (hidden, norm.weight)]
    exact = F.rms_norm(wide[0], (8,), wide[1] + 1, norm.eps)
    assert torch.equal(outputs[0], exact.bfloat16())
    grad_output = torch.randn(5, 1, 8).bfloat16()
    wanted = torch.autograd.grad(exact, wide, grad_output.float())
    found = torch.autograd.grad(outputs[0], (hidden, norm.weight), grad_output)
    for one, other in zip(found, wanted, strict=True):
        assert torch.equal(one, other.bfloat16())
    assert sorted(t.numel() for t in kept) == [5, 8, 40]
    assert {t.dtype for t in kept if t.numel() == 40} == {torch.bfloat16}


def test_a_residual_multiplier_scales_what_is_added():
    output, residual = torch.randn(2, 4, 1, 8).unbind()
    for multiplier in (1.0, 0.25):
        add = residual_sum(multiplier)(True, False)
        summed = add((output.clone(), None), residual, 0.0)
        assert torch.equal(summed, residual + multiplier * output)
