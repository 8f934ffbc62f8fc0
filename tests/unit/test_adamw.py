"""AdamW in pieces against torch's on whole float32 weights, split main weights, fresh state."""

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from puzzle_align.runtime.optimizer import adamw
from puzzle_align.runtime.optimizer.adamw import PieceAdamW, joined, split
from puzzle_align.runtime.optimizer.state import allocate_state

SIZES = [5000, 1, 1024, 3079]
BETAS, EPSILON, DECAY = (0.9, 0.95), 1e-8, 0.1
RATES = [1e-3, 1e-6, 3e-4, 1e-6, 5e-3]


def _weights(dtype: torch.dtype, device: str = "cpu") -> list[Tensor]:
    seed = torch.Generator().manual_seed(7)
    return [torch.randn(n, generator=seed).to(device, dtype) for n in SIZES]


def _gradients(step: int, device: str = "cpu") -> list[Tensor]:
    """Gradients of very different sizes, some of them zero."""
    seed = torch.Generator().manual_seed(100 + step)
    found = [torch.randn(n, generator=seed) * 10.0 ** (step - 3) for n in SIZES]
    for gradient in found:
        gradient[::7] = 0.0
    return [gradient.to(device) for gradient in found]


def _groups(shards: list[Tensor]) -> list[dict[str, Any]]:
    """Groups like Megatron-core's: with decay and without, and one without parameters."""
    own = {"betas": BETAS, "eps": EPSILON}
    decays = ((shards[::2], DECAY), (shards[1::2], 0.0), ([], DECAY))
    return [{"params": params, "weight_decay": decay, **own} for params, decay in decays]


def _in_pieces(
    shards: list[Tensor],
    dtype: torch.dtype,
    *,
    offload: bool = False,
    piece_size: int = 1024,
    num_steps: int = len(RATES),
) -> PieceAdamW:
    """Some steps on the shards, which are the model's weights."""
    optimizer = PieceAdamW(_groups(shards), dtype=dtype, offload=offload, piece_size=piece_size)
    for step in range(num_steps):
        _take_step(optimizer, shards, step)
    return optimizer


def _take_step(optimizer: PieceAdamW, shards: list[Any], step: int) -> None:
    for shard, gradient in zip(shards, _gradients(step, shards[0].device.type), strict=True):
        shard.decoupled_grad = gradient
    for group in optimizer.param_groups:
        group["lr"] = RATES[step]
    optimizer.step()


def _whole(weights: list[Tensor]) -> tuple[list[Tensor], list[tuple[Tensor, Tensor]]]:
    """Main weights and moments after the same steps by torch's AdamW."""
    mains = [weight.float().clone().requires_grad_() for weight in weights]
    inner = torch.optim.AdamW(_groups(mains))
    for step, rate in enumerate(RATES):
        for main, gradient in zip(mains, _gradients(step), strict=True):
            main.grad = gradient
        for group in inner.param_groups:
            group["lr"] = rate
        inner.step()
    moments = [(inner.state[m]["exp_avg"], inner.state[m]["exp_avg_sq"]) for m in mains]
    return [main.detach() for main in mains], moments


def _same(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(map(torch.equal, one, other))


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16])
def test_with_float32_state_it_is_torch_s_bitwise(weights: torch.dtype, offload: bool) -> None:
    shards = _weights(weights)
    expected, moments = _whole(shards)
    optimizer = _in_pieces(shards, torch.float32, offload=offload)
    mains = [optimizer.get_unscaled_state(shard, "master_param") for shard in shards]
    assert _same(mains, expected)
    assert _same(shards, [main.to(weights) for main in expected])
    for number, name in enumerate(("exp_avg", "exp_avg_sq")):
        found = [optimizer.get_unscaled_state(shard, name) for shard in shards]
        assert _same(found, [own[number] for own in moments])
    assert [group.get("step") for group in optimizer.param_groups] == [5, 5, None]


def _by_hand(weights: list[Tensor]) -> tuple[list[Tensor], list[list[Tensor]]]:
    """Main weights and moments in float64, the moments rounded to bf16 after every step."""
    mains = [weight.double() for weight in weights]
    moments = [[torch.zeros_like(main) for _ in BETAS] for main in mains]
    for step, rate in enumerate(RATES):
        for number, gradient in enumerate(_gradients(step)):
            decay = DECAY if number % 2 == 0 else 0.0
            unbiased = []
            for place, (beta, power) in enumerate(zip(BETAS, (1, 2), strict=True)):
                value = beta * moments[number][place] + (1 - beta) * gradient.double() ** power
                unbiased.append(value / (1 - beta ** (step + 1)))
                moments[number][place] = value.bfloat16().double()
            change = unbiased[0] / (unbiased[1].sqrt() + EPSILON) + decay * mains[number]
            mains[number] = mains[number] - rate * change
    return mains, moments


@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16])
def test_bf16_moments_are_rounded_once_a_step(weights: torch.dtype) -> None:
    shards = _weights(weights)
    expected, moments = _by_hand(shards)
    optimizer = _in_pieces(shards, torch.bfloat16)
    for shard, main, own in zip(shards, expected, moments, strict=True):
        found = optimizer.get_unscaled_state(shard, "master_param")
        # A moment that float32 rounds to the other side is 2^-8 of itself away: a rate's part.
        assert (found - main).abs().max() < 1e-6 * main.abs().max() + 2**-8 * max(RATES)
        near = (found - main).abs() < 1e-6 * main.abs() + 1e-7
        assert near.double().mean() > 0.99 or len(shard) == 1
        for name, value in zip(("exp_avg", "exp_avg_sq"), own, strict=True):
            state = optimizer.state[shard][name]
            assert state.dtype is torch.bfloat16
            equal = state == value.bfloat16()
            assert equal.double().mean() > 0.99 or len(shard) == 1
            assert ((state - value).abs() <= 2**-7 * value.abs()).all()
        if weights is torch.bfloat16:
            assert optimizer.state[shard]["master_param"].dtype is torch.int16


@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pieces_and_their_place_change_no_bit(weights: torch.dtype, dtype: torch.dtype) -> None:
    whole = _weights(weights)
    first = _in_pieces(whole, dtype, piece_size=10_000)
    for offload, size in ((True, 10_000), (False, 512), (True, 512)):
        shards = _weights(weights)
        optimizer = _in_pieces(shards, dtype, offload=offload, piece_size=size)
        assert _same(shards, whole)
        for one, other in zip(whole, shards, strict=True):
            assert first.state[one].keys() == optimizer.state[other].keys()
            for name, value in first.state[one].items():
                assert torch.equal(value, optimizer.state[other][name]), name


@pytest.mark.parametrize(("offload", "num_launches"), [(False, 4), (True, 5 + 1 + 1 + 4)])
def test_the_kernel_updates_whole_shards_unless_their_state_is_the_host_s(
    offload: bool, num_launches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it is given is scaled, and what it writes is kept."""
    sizes: list[int] = []

    def kernel(weight: Tensor, main: Tensor, gradient: Tensor, *rest: Any) -> None:
        first, second, _, scale = rest
        sizes.append(len(weight))
        for written, value in ((first, scale * gradient), (second, -gradient), (main, 7)):
            written[:] = value

    monkeypatch.setattr(adamw, "_kernel", lambda device: kernel)
    monkeypatch.setattr(PieceAdamW, "scale", 0.5)
    shards = _weights(torch.bfloat16)
    optimizer = _in_pieces(shards, torch.bfloat16, offload=offload, num_steps=1)
    assert len(sizes) == num_launches and sum(sizes) == sum(SIZES)
    for shard, gradient in zip(shards, _gradients(0), strict=True):
        first, second, main = optimizer.state[shard].values()
        assert torch.equal(first, 0.5 * gradient.bfloat16())
        assert torch.equal(second, -gradient.bfloat16()) and (main == 7).all()


def test_a_piece_is_updated_before_the_next_one_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device works while the host makes the next piece."""
    done: list[str] = []
    state_of = PieceAdamW._state_of

    def kernel(weight: Tensor, *_: object) -> None:
        done.append(f"update {len(weight)}")

    def made(self: PieceAdamW, shard: Tensor) -> Any:
        done.append(f"make {len(shard)}")
        return state_of(self, shard)

    monkeypatch.setattr(adamw, "_kernel", lambda device: kernel)
    monkeypatch.setattr(PieceAdamW, "_state_of", made)
    shards = _weights(torch.bfloat16)
    _in_pieces(shards, torch.bfloat16, num_steps=1)
    steps = done[-2 * len(shards) :]
    assert sorted(steps[::2]) == sorted(f"make {len(shard)}" for shard in shards)
    assert [step.replace("make", "update") for step in steps[::2]] == steps[1::2]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_state_goes_through_float32_and_back(dtype: torch.dtype) -> None:
    """After a round trip like a checkpoint's, the next step is bitwise the same."""
    shards = _weights(torch.bfloat16)
    optimizer = _in_pieces(shards, dtype, num_steps=3)
    others = [torch.zeros_like(shard) for shard in shards]
    resumed = PieceAdamW(_groups(others), dtype=dtype, offload=True, piece_size=1024)
    resumed.allocate()
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for shard, other in zip(shards, others, strict=True):
        for name in optimizer.state[shard]:
            value = optimizer.get_unscaled_state(shard, name)
            assert value.dtype is torch.float32
            resumed.set_scaled_state(other, name, value)
    assert _same(shards, others)
    for each, own in ((optimizer, shards), (resumed, others)):
        _take_step(each, own, 3)
    assert _same(shards, others)
    for shard, other in zip(shards, others, strict=True):
        assert all(
            torch.equal(v, resumed.state[other][n]) for n, v in optimizer.state[shard].items()
        )
    assert [group["step"] for group in resumed.param_groups] == [4, 4, 0]


def test_a_step_far_below_a_bf16_weight_s_precision_is_taken() -> None:
    shard: Any = torch.ones(8, dtype=torch.bfloat16)
    optimizer = PieceAdamW(_groups([shard]), dtype=torch.bfloat16, offload=False)
    optimizer.param_groups[0] |= {"lr": 1e-6, "weight_decay": 0.0}
    for _ in range(100):
        shard.decoupled_grad = torch.ones(8)
        optimizer.step()
    assert (shard == 1).all()
    main = joined(shard, optimizer.state[shard]["master_param"])
    # To 5%: moments that are rounded stop a little before what they tend to.
    assert torch.allclose(main, torch.full((8,), 1 - 1e-4), atol=5e-6, rtol=0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16])
def test_on_a_gpu_the_host_s_state_changes_no_bit(weights: torch.dtype, dtype: torch.dtype) -> None:
    """State is pinned, of float32 weights the moments; the step is the CPU's but for rounding."""
    on_device = _weights(weights, "cuda")
    first = _in_pieces(on_device, dtype, piece_size=512)
    shards = _weights(weights, "cuda")
    optimizer = _in_pieces(shards, dtype, offload=True, piece_size=512)
    assert _same(on_device, shards)
    torch.cuda.synchronize()
    for one, other in zip(on_device, shards, strict=True):
        for name, value in first.state[one].items():
            kept = optimizer.state[other][name]
            assert torch.equal(value.cpu(), kept.cpu()), name
            assert value.is_cuda and (kept.is_pinned() or kept.data_ptr() == other.data_ptr())
    on_host = _weights(weights)
    _in_pieces(on_host, dtype)
    for one, other in zip(on_host, shards, strict=True):
        assert torch.allclose(one.float(), other.cpu().float(), atol=2**-7, rtol=2**-7)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_on_a_gpu_a_step_holds_two_pieces_of_the_host_s_state() -> None:
    number, piece = 2**24, 2**18
    shard: Any = torch.ones(number, dtype=torch.bfloat16, device="cuda")
    optimizer = PieceAdamW(_groups([shard]), dtype=torch.bfloat16, offload=True, piece_size=piece)
    optimizer.param_groups[0]["lr"] = 1e-3
    shard.decoupled_grad = torch.ones(number, device="cuda")
    optimizer.allocate()
    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated()
    optimizer.step()
    assert torch.cuda.memory_allocated() == held
    assert torch.cuda.max_memory_allocated() - held < 60 * piece  # 96 MB would be all of it


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


def test_the_host_s_state_takes_the_device_two_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole pieces, as estimates of memory count them."""
    sizes: list[int] = []

    class Noted(adamw._Staging):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            sizes.append(sum(x.nbytes for slot in self._slots for x in slot.values()))

    monkeypatch.setattr(adamw, "_Staging", Noted)
    for dtype in (torch.bfloat16, torch.float32):
        _in_pieces(_weights(torch.bfloat16), dtype, offload=True, num_steps=1)
    assert sizes == [2 * 1024 * (2 + 2 + 2), 2 * 1024 * (4 + 4 + 4)]


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
def test_a_gpu_without_triton_updates_a_piece_by_one_kernel_of_torch_s(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[dict[str, Any]] = []
    monkeypatch.setattr(adamw, "_kernel", lambda device: None)
    monkeypatch.setattr(adamw, "adamw", lambda *_, **named: calls.append(named))
    with FakeTensorMode():
        shard: Any = torch.zeros(8, device="cuda")
        shard.decoupled_grad = torch.zeros_like(shard)
        groups = [{"lr": 1e-3, **group} for group in _groups([shard])]
        PieceAdamW(groups, dtype=torch.float32, offload=False).step()
    assert [(each["fused"], each["foreach"]) for each in calls] == [(True, False)]


class CountsByGroup(torch.optim.Optimizer):
    """Counts as FusedAdam does; its arithmetic is not what is tested."""

    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for parameter in group["params"]:
                self.state[parameter]["exp_avg"] = torch.zeros_like(parameter)


def test_allocating_does_not_count_as_a_step() -> None:
    parameters = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
    groups = [{"params": [parameter]} for parameter in parameters]
    inner = CountsByGroup(groups, {"lr": 0.5, "weight_decay": 0.1})
    optimizer: Any = SimpleNamespace(optimizer=inner)
    allocate_state(optimizer)
    assert len(inner.state) == 2
    assert [(g["step"], g["lr"], g["weight_decay"]) for g in inner.param_groups] == [
        (0, 0.5, 0.1),
        (0, 0.5, 0.1),
    ]
    inner.step()
    allocate_state(optimizer)
    assert [group["step"] for group in inner.param_groups] == [1, 1]
