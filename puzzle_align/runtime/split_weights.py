"""A float32 main weight as a bf16 weight and the 16 bits that it leaves out, two bytes each.

Invariants (the tests assert them):
- ``joined`` gives back every bit of what was ``split``;
- the bf16 weight is the nearest to the main weight. One that lies halfway between two goes to the
  larger in magnitude: to the even one, as a cast would, no 16 bits more could tell it from its
  neighbour. (Transformer Engine's ``store_param_remainders`` rounds so too.)
"""

import torch
from torch import Tensor


def split(main: Tensor, weight: Tensor) -> Tensor:
    """Put the nearest weights of float32 ``main`` into bf16 ``weight``, [n] both.

    Returns:
        The remainder, int16 [n]: a view of ``main``.
    """
    low, high = _halves(main)
    # Below zero the lower half is more than half of the upper one's last place: round away.
    torch.sub(high, low >> 15, out=weight.view(torch.int16))
    return low


def joined(weight: Tensor, remainder: Tensor) -> Tensor:
    """The float32 main weights [n] of bf16 ``weight`` and int16 ``remainder``, [n] both."""
    main = torch.empty(weight.shape, dtype=torch.float32, device=weight.device)
    low, high = _halves(main)
    low.copy_(remainder)
    torch.add(weight.view(torch.int16), remainder >> 15, out=high)
    return main


def _halves(main: Tensor) -> tuple[Tensor, Tensor]:
    """Views of float32 numbers' lower and upper 16 bits, as integers: the lower lie first."""
    low, high = main.view(torch.int16).view(-1, 2).unbind(1)
    return low, high
