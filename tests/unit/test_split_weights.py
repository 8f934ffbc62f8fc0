"""Main weights in two halves: nothing is lost, and the bf16 weight is the nearest one."""

import torch

from puzzle_align.runtime.optimizer.adamw import joined, split


def _bits(*patterns: int) -> torch.Tensor:
    """The float32 numbers of these 32 bits."""
    return torch.tensor([p - 2**32 * (p >> 31) for p in patterns], dtype=torch.int32).view(
        torch.float32
    )


def _split(main: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    weight = torch.empty(main.shape, dtype=torch.bfloat16)
    return weight, split(main.clone(), weight)


def _some_numbers() -> torch.Tensor:
    """A million of any bits, every lower half on some upper ones, and the ends of the range."""
    seed = torch.Generator().manual_seed(1)
    drawn = torch.randint(-(2**31), 2**31, (2**20,), generator=seed, dtype=torch.int64)
    halves = torch.arange(2**16, dtype=torch.int64)
    uppers = torch.tensor([0x0000, 0x8000, 0x3F7F, 0x3F80, 0xBFFF, 0x0080, 0x7F7F])
    chosen = (uppers[:, None] << 16) + halves
    chosen = torch.where(chosen >= 2**31, chosen - 2**32, chosen).flatten()
    return torch.cat([drawn, chosen]).to(torch.int32).view(torch.float32)


def test_every_bit_comes_back() -> None:
    main = _some_numbers()
    weight, remainder = _split(main)
    assert remainder.dtype is torch.int16
    assert torch.equal(joined(weight, remainder).view(torch.int32), main.view(torch.int32))


def test_weights_are_those_of_a_cast_but_for_ties() -> None:
    main = _some_numbers()
    main = main[main.isfinite()]
    weight, _ = _split(main)
    tie = (main.view(torch.int32) & 0xFFFF) == 0x8000
    assert 10 < tie.sum() < 1000
    assert torch.equal(weight[~tie].view(torch.int16), main[~tie].bfloat16().view(torch.int16))
    assert (weight[tie].abs().float() > main[tie].abs()).all()


def test_by_hand() -> None:
    # 1, a little more, half a step, a little more than that, and below zero.
    main = _bits(0x3F800000, 0x3F800001, 0x3F808000, 0x3F808001, 0xBF80FFFF)
    weight, remainder = _split(main)
    step = 2.0**-7
    assert weight.tolist() == [1.0, 1.0, 1 + step, 1 + step, -1 - step]
    assert remainder.tolist() == [0, 1, -(2**15), 1 - 2**15, -1]


def test_small_steps_add_up() -> None:
    """Steps that a bf16 weight alone would never take."""
    weight = torch.ones(3, dtype=torch.bfloat16)
    remainder = torch.zeros(3, dtype=torch.int16)
    for _ in range(10_000):
        main = joined(weight, remainder)
        main -= 1e-6
        remainder = split(main, weight)
    assert torch.allclose(joined(weight, remainder), torch.full((3,), 0.99), atol=1e-3)
    assert (weight.float() - 0.99).abs().max() < 2**-8
