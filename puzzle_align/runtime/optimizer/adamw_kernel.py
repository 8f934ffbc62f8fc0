"""AdamW of a piece in one pass over its memory: a Triton kernel for CUDA.

The kernel joins the main weight, scales the gradient, updates moments and main weight in float32,
and splits or rounds the main weight. With bf16 moments and remainders it moves 20 bytes a number:
it reads the gradient (4), weight, remainder and both moments (2 each), and writes these four. The
same steps as separate torch kernels move about 90.

bf16 numbers are passed as their bits, int16, and rounded to the nearest even one by integers:
Triton's interpreter, which runs the kernel on a CPU for the tests, truncates in a cast.

The update differs from torch's AdamW in the last bits of float32: products and sums fuse.
"""

from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

BLOCK = 1024  # numbers of a program
# Forms of the main weight: the weight itself (float32), a float32 number beside a bf16 weight, or
# a 16-bit remainder beside it (``adamw.split``). The kernel has the numbers: it reads no globals.
ITSELF, BESIDE, REMAINDER = 0, 1, 2
_WRITTEN = ("weight", "main", "first", "second")


@triton.jit
def _float(bits: tl.tensor) -> tl.tensor:
    """float32 numbers of bf16 bits, int16."""
    return (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def _bits(number: tl.tensor) -> tl.tensor:
    """bf16 bits, int16, of the nearest bf16 numbers; of two as near, the even one's."""
    whole = number.to(tl.int32, bitcast=True)
    return ((whole + 0x7FFF + ((whole >> 16) & 1)) >> 16).to(tl.int16)


@triton.jit
def _load(
    pointer: tl.tensor, places: tl.tensor, inside: tl.tensor, small: tl.constexpr
) -> tl.tensor:
    number = tl.load(pointer + places, mask=inside)
    return _float(number) if small else number


@triton.jit
def _store(
    pointer: tl.tensor,
    places: tl.tensor,
    number: tl.tensor,
    inside: tl.tensor,
    small: tl.constexpr,
) -> None:
    tl.store(pointer + places, _bits(number) if small else number, mask=inside)


@triton.jit
def adamw_program(
    weight: tl.tensor,
    main: tl.tensor,
    gradient: tl.tensor,
    first: tl.tensor,
    second: tl.tensor,
    size: tl.tensor,
    scale: tl.tensor,
    decay: tl.tensor,
    weight1: tl.tensor,
    beta2: tl.tensor,
    weight2: tl.tensor,
    step_size: tl.tensor,
    root2: tl.tensor,
    eps: tl.tensor,
    form: tl.constexpr,
    small: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """Update ``block`` numbers; ``small``: the moments are bf16."""
    places = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = places < size
    if form == 2:
        low = tl.load(main + places, mask=inside)
        high = tl.load(weight + places, mask=inside).to(tl.int32) + (low.to(tl.int32) >> 15)
        value = ((high << 16) | (low.to(tl.int32) & 0xFFFF)).to(tl.float32, bitcast=True)
    else:
        value = tl.load(main + places, mask=inside)
    slope = tl.load(gradient + places, mask=inside) * scale
    m = _load(first, places, inside, small)
    v = _load(second, places, inside, small)
    m += weight1 * (slope - m)
    v = beta2 * v + weight2 * slope * slope
    value = value * decay - step_size * m / (tl.sqrt(v) / root2 + eps)
    _store(first, places, m, inside, small)
    _store(second, places, v, inside, small)
    if form == 2:
        whole = value.to(tl.int32, bitcast=True)
        low = whole.to(tl.int16)
        tl.store(main + places, low, mask=inside)
        high = (whole >> 16) - (low.to(tl.int32) >> 15)
        tl.store(weight + places, high.to(tl.int16), mask=inside)
    else:
        tl.store(main + places, value, mask=inside)
        if form == 1:
            tl.store(weight + places, _bits(value), mask=inside)


def update(
    weight: Tensor,
    main: Tensor,
    gradient: Tensor,
    first: Tensor,
    second: Tensor,
    group: Mapping[str, Any],
    scale: float,
) -> None:
    """Update weights, main weights and moments in place, [n] each.

    Args:
        weight: float32, then ``main`` is the same tensor; or bf16.
        main: float32, or int16 remainders of bf16 weights.
        gradient: float32; it stays.
        first, second: the moments, both float32 or both bf16.
        group: lr, betas, eps, weight_decay, and step, counted from 1.
        scale: multiplies the gradient.
    """
    (beta1, beta2), step, lr = group["betas"], group["step"], group["lr"]
    root2 = (1 - beta2**step) ** 0.5
    numbers = [scale, 1 - lr * group["weight_decay"], 1 - beta1, beta2, 1 - beta2]
    numbers += [lr / (1 - beta1**step), root2, group["eps"]]
    # An op takes the host 100 us a call, longer than many a piece takes the device.
    launch = _op if isinstance(weight, FakeTensor) or weight.is_meta else _launch
    launch(weight, main, gradient, first, second, numbers)


def _launch(
    weight: Tensor,
    main: Tensor,
    gradient: Tensor,
    first: Tensor,
    second: Tensor,
    numbers: list[float],
) -> None:
    """Launch the kernel on tensors [n] with its numbers from ``scale`` to ``eps``."""
    kernel: Any = adamw_program
    kernel[(triton.cdiv(weight.numel(), BLOCK),)](
        *map(_as_bits, (weight, main, gradient, first, second)),
        weight.numel(),
        *numbers,
        form=form_of(weight, main),
        small=first.dtype is torch.bfloat16,
        block=BLOCK,
    )


_op = torch.library.custom_op("puzzle_align::adamw", mutates_args=_WRITTEN)(_launch)


@_op.register_fake
def _check(
    weight: Tensor,
    main: Tensor,
    gradient: Tensor,
    first: Tensor,
    second: Tensor,
    numbers: list[float],
) -> None:
    """Check what the kernel assumes of its tensors, where they have no memory (fake, meta)."""
    tensors = (weight, main, gradient, first, second)
    assert all(x.dim() == 1 and x.is_contiguous() for x in tensors)
    assert len({(x.device, x.shape) for x in tensors}) == 1, [(x.device, x.shape) for x in tensors]
    assert gradient.dtype is torch.float32
    assert first.dtype is second.dtype and first.dtype in (torch.float32, torch.bfloat16)
    mains = {torch.bfloat16: (torch.int16, torch.float32), torch.float32: (torch.float32,)}
    assert main.dtype in mains[weight.dtype], (weight.dtype, main.dtype)


def try_update(device: torch.device) -> None:
    """Update a few numbers, to see whether the kernel compiles and runs here."""
    weight, gradient, first, second = torch.zeros(4, 8, device=device)
    group = {"betas": (0.9, 0.95), "step": 1, "lr": 0.0, "eps": 1.0, "weight_decay": 0.0}
    update(weight, weight, gradient, first, second, group, 1.0)


def form_of(weight: Tensor, main: Tensor) -> int:
    """Form of the main weight (above)."""
    if main.dtype is torch.int16:
        return REMAINDER
    return ITSELF if main.data_ptr() == weight.data_ptr() else BESIDE


def _as_bits(x: Tensor) -> Tensor:
    return x.view(torch.int16) if x.dtype is torch.bfloat16 else x
