"""``transformer_engine_torch`` in plain torch: what layers without FP8 call, and names of the rest.

``products`` counts matrix products by what they are for: "output", "input gradient" and "weight
gradient".
"""

import enum
from collections import Counter
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

products: Counter[str] = Counter()


class DType(enum.IntEnum):
    """Types of numbers."""

    kByte = 0
    kInt16 = 1
    kInt32 = 2
    kInt64 = 3
    kFloat32 = 4
    kFloat16 = 5
    kBFloat16 = 6
    kFloat8E4M3 = 7
    kFloat8E5M2 = 8
    kFloat4E2M1 = 9
    kFloat8E8M0 = 10


class CommOverlapType(enum.IntEnum):
    """Collectives that a product may overlap."""

    RS = 0
    AG = 1


class Float8BlockScaleTensorFormat(enum.IntEnum):
    """Layouts of scales."""

    GEMM_READY = 0
    COMPACT = 1


_DTYPES = {DType.kFloat32: torch.float32, DType.kBFloat16: torch.bfloat16}


def generic_gemm(
    A: Tensor,
    transa: bool,
    B: Tensor,
    transb: bool,
    out: Tensor | None,
    quantizer: object,
    out_dtype: DType,
    bias: Tensor | None,
    _bias_dtype: DType,
    _gelu: bool,
    _gelu_in: Tensor | None,
    grad: bool,
    _workspace: Tensor,
    _workspace_size: int,
    accumulate: bool,
    _use_split_accumulator: bool,
    **others: Any,
) -> tuple[Tensor, Tensor | None, None, Any]:
    """Multiply, in the layouts of a linear layer's three products (column-major's names)."""
    assert quantizer is None
    a, b = A.reshape(-1, A.shape[-1]), B.reshape(-1, B.shape[-1])
    if transb:
        products["weight gradient"] += 1
        made = b.t() @ a
    else:
        products["output" if transa else "input gradient"] += 1
        made = (b @ (a.t() if transa else a)).view(*B.shape[:-1], -1)
    bias_gradient = b.sum(0) if bias is not None and grad else None
    if bias is not None and not grad:
        made = made + bias
    made = made.to(_DTYPES[out_dtype])
    if out is not None:
        made = out.add_(made) if accumulate else out.copy_(made)
    return made, bias_gradient, None, others.get("extra_output")


def rmsnorm_fwd(
    x: Tensor,
    weight: Tensor,
    eps: float,
    out: Tensor | None,
    quantizer: object,
    _dtype: DType,
    _sm_margin: int,
    zero_centered_gamma: bool,
) -> tuple[Tensor, None, Tensor]:
    """Normalise rows [S, H]; return them and their reciprocal roots [S]."""
    assert quantizer is None
    scale = torch.rsqrt(x.float().square().mean(-1) + eps)
    made = x.float() * scale[:, None] * (weight.float() + zero_centered_gamma)
    made = made.to(x.dtype)
    return made if out is None else out.copy_(made), None, scale


def rmsnorm_bwd(
    gradient: Tensor,
    x: Tensor,
    scale: Tensor,
    weight: Tensor,
    _sm_margin: int,
    zero_centered_gamma: bool,
) -> tuple[Tensor, Tensor]:
    """Gradients of rows and weight."""
    normal = x.float() * scale[:, None]
    of_weight = (gradient.float() * normal).sum(0).to(weight.dtype)
    scaled = gradient.float() * (weight.float() + zero_centered_gamma)
    mean = (scaled * normal).mean(-1, keepdim=True)
    return (scale[:, None] * (scaled - normal * mean)).to(x.dtype), of_weight


def swiglu(x: Tensor, _quantizer: object) -> Tensor:
    """SwiGLU of gate and up, side by side."""
    gate, up = x.float().chunk(2, -1)
    return (F.silu(gate) * up).to(x.dtype)


def dswiglu(gradient: Tensor, x: Tensor, _quantizer: object) -> Tensor:
    """Gradient of ``swiglu``'s input."""
    with torch.enable_grad():
        inputs = x.detach().float().requires_grad_()
        gate, up = inputs.chunk(2, -1)
        (found,) = torch.autograd.grad(F.silu(gate) * up, inputs, gradient.float())
    return found.to(x.dtype)


def get_cublasLt_version() -> int:
    """A new one."""
    return 130000


class _Named(type):
    """Classes whose attributes are names."""

    def __getattr__(cls, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return f"{cls.__name__}.{name}"


class _Unused(metaclass=_Named):
    def __init__(self, *_args: object, **_kwargs: object) -> None:
        pass


def layernorm_fwd(*_args: object) -> None:
    """Not emulated; named here since star imports take it."""
    raise NotImplementedError("layernorm_fwd")


layernorm_bwd = layernorm_fwd


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    if name[0].isupper():
        return _Named(name, (_Unused,), {})

    def missing(*_args: object, **_kwargs: object) -> None:
        raise NotImplementedError(name)

    return missing
