"""The optimizer against torch's AdamW, and a step whose gradients are not finite.

Distributed optimizer on and off: the same weights after every step, to their rounding. In parts or
at once: bitwise the same. With state on the host: bitwise the same, and with small state nearly.
Gradients and state that are set aside between steps: their memory is free, and nothing is lost.
"""

import copy
import itertools
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch.profiler import ProfilerActivity

from puzzle_align.config.sections.optimizer import OptimizerConfig, learning_rate
from puzzle_align.layout.plan import ParallelPlan
from puzzle_align.runtime.groups.world import World
from puzzle_align.runtime.optimizer import state as optimizer_state
from puzzle_align.runtime.optimizer.optimizer import Optimizer, Update, fuse, on_host, set_aside
from puzzle_align.runtime.optimizer.state import allocate_state, gather_in_pieces
from tests.bounds import fp32_bound
from tests.dist.random_models import random_context, trainable
from tests.dist.spawn import run_ranks
from tests.dist.test_optimizer_kinds import CountsByGroup
from tests.specs import TINY

BETAS, EPSILON, DECAY = (0.8, 0.9), 1e-3, 0.1  # no default
# By hand: a warm-up of 2, then a cosine that would be at 0.001 one step after the last.
RATES = [0.005, 0.01, 0.01, 0.008681980515339465, 0.0055, 0.0023180194846605363]
WEIGHTS = fp32_bound(len(RATES))  # absolute, of weights up to 1: every step rounds them once
NORM_FACTORS = [0.1, 5.0, 0.1, 5.0, 1.0, 0.1]  # gradients that are clipped and that are not
MAX_NORM = 100.0
NORM = fp32_bound(16)  # relative, of a sum of the tensors' squares; 1.2e-7 was seen

State = dict[str, Any]  # keys of the optimizer's state
PLAIN: State = {}
SMALL: State = {"state_dtype": "bf16"}
ON_HOST: State = {"cpu_offload": True}

Seen = tuple[float, dict[str, np.ndarray]]  # gradient norm, and weights after the step


def _optimizer(
    world: World, distributed: bool, dtype: str = "fp32", state: State = PLAIN
) -> Optimizer:
    context = random_context(TINY, ParallelPlan(data=world.size), world, seed=3, dtype=dtype)
    config = OptimizerConfig(
        lr=0.01,
        min_lr=0.001,
        warmup_steps=2,
        max_grad_norm=MAX_NORM,
        use_distributed_optimizer=distributed,
        weight_decay=DECAY,
        adam_beta1=BETAS[0],
        adam_beta2=BETAS[1],
        adam_eps=EPSILON,
        **state,
    )
    return trainable(context, config)


def _weights(optimizer: Optimizer) -> dict[str, torch.Tensor]:
    chunk = optimizer.context.chunks[0]
    return {name: value.detach().clone() for name, value in chunk.named_parameters()}


def _gradient(name: str, shape: torch.Size, step: int, rank: int) -> torch.Tensor:
    seed = sum(name.encode()) * 100 + step * 10 + rank
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return NORM_FACTORS[step] * values


def _put_gradients(optimizer: Optimizer, step: int, rank: int) -> None:
    optimizer.zero_grad()
    for name, parameter in optimizer.context.chunks[0].named_parameters():
        parameter.main_grad.copy_(_gradient(name, parameter.shape, step, rank))


def _several_steps(
    rank: int,
    world: World,
    distributed: bool,
    dtype: str = "fp32",
    state: State = PLAIN,
    allocated: bool = False,
) -> list[Seen]:
    """Steps of an optimizer whose state is there before them, or is not."""
    optimizer = _optimizer(world, distributed, dtype, state)
    if allocated:  # as by a save
        allocate_state(optimizer.megatron)
    seen = [(0.0, _arrays(optimizer))]
    for step in range(len(RATES)):
        _put_gradients(optimizer, step, rank)
        optimizer.reduce_gradients()
        moved, norm = optimizer.step(learning_rate(optimizer.config, step, len(RATES)))
        assert moved
        seen.append((norm, _arrays(optimizer)))
    return seen


def _arrays(optimizer: Optimizer) -> dict[str, np.ndarray]:
    return {name: value.float().numpy() for name, value in _weights(optimizer).items()}


def _state(optimizer: Optimizer) -> list[dict[str, Any]]:
    inner = [part.optimizer for part in optimizer.megatron.chained_optimizers]
    mains = [(one, m) for one in inner for group in one.param_groups for m in group["params"]]
    return copy.deepcopy([one.state[main] for one, main in mains])


def _bad_step(rank: int, world: World, distributed: bool, bad: float, state: State = PLAIN) -> None:
    """One good step, one bad on rank 1 alone, one good again."""
    optimizer = _optimizer(world, distributed, state=state)
    _put_gradients(optimizer, 0, rank)
    optimizer.reduce_gradients()
    assert optimizer.step(0.01)[0]
    weights, kept = _weights(optimizer), _state(optimizer)
    assert any(kept), "a step leaves state behind"
    _put_gradients(optimizer, 1, rank)
    if rank == 1:
        next(optimizer.context.chunks[0].parameters()).main_grad.view(-1)[3] = bad
    optimizer.reduce_gradients()
    moved, norm = optimizer.step(0.01)
    assert not moved and not np.isfinite(norm)
    for name, value in _weights(optimizer).items():
        assert torch.equal(value, weights[name]), name
    for before, after in zip(kept, _state(optimizer), strict=True):
        assert before.keys() == after.keys()
        for key, value in before.items():
            same = torch.equal(value, after[key]) if torch.is_tensor(value) else value == after[key]
            assert same, key
    _put_gradients(optimizer, 2, rank)
    optimizer.reduce_gradients()
    assert optimizer.step(0.01)[0]
    assert not all(torch.equal(v, weights[n]) for n, v in _weights(optimizer).items())


def _count_by_group(optimizer: Optimizer) -> None:
    for part in optimizer.megatron.chained_optimizers:
        part.optimizer = CountsByGroup(part.optimizer.param_groups)


def _step_in_parts(optimizer: Optimizer, step: int, distributed: bool) -> tuple[bool, float]:
    """A step in parts, in any order, and with a rest."""
    chunk = optimizer.context.chunks[0]
    names, parameters = [name for name, _ in chunk.named_parameters()], list(chunk.parameters())
    chosen = {*names[1::3], *names[::-2]}

    def in_parts(update: Update) -> None:
        before = _weights(optimizer)
        update(parameters[1::3])
        update(parameters[::-2])  # some of them again
        moved = {n for n, value in _weights(optimizer).items() if not torch.equal(before[n], value)}
        # Of the distributed optimizer the shards have moved, which are gathered in the end.
        assert distributed or chosen == moved != set(names)

    return optimizer.step(RATES[step], in_parts)


def _in_parts(
    rank: int,
    world: World,
    distributed: bool,
    dtype: str,
    by_group: bool,
    state: State = PLAIN,
) -> None:
    """Steps in parts: bitwise those at once, optimizer state too."""
    whole, parts = (_optimizer(world, distributed, dtype, state) for _ in range(2))
    if by_group:
        _count_by_group(whole)
        _count_by_group(parts)
    for step in range(3):
        for optimizer in (whole, parts):
            _put_gradients(optimizer, step, rank)
            optimizer.reduce_gradients()
        assert _step_in_parts(parts, step, distributed) == whole.step(RATES[step])
        for one, other in zip(_weights(whole).items(), _weights(parts).items(), strict=True):
            assert one[0] == other[0] and torch.equal(one[1], other[1]), one[0]
        for before, after in zip(_state(whole), _state(parts), strict=True):
            assert before.keys() == after.keys()
            assert all(torch.equal(before[key], after[key]) for key in before)
        for optimizer in (whole, parts) if by_group or state else ():
            groups = [group for group in optimizer.megatron.param_groups if group["params"]]
            assert groups and all(group["step"] == step + 1 for group in groups)


def _all_cases(rank: int, world_size: int) -> dict[bool, list[Seen]]:
    world = World(rank, world_size, torch.device("cpu"))
    for distributed, bad in ((False, float("inf")), (True, float("nan"))):
        _bad_step(rank, world, distributed, bad)
    _bad_step(rank, world, True, float("nan"), SMALL | ON_HOST)
    for distributed, dtype, by_group in (
        (False, "fp32", False),
        (False, "bf16", True),
        (True, "fp32", True),
        (True, "bf16", False),
    ):
        _in_parts(rank, world, distributed, dtype, by_group)
    _in_parts(rank, world, True, "bf16", by_group=False, state=SMALL | ON_HOST)
    _other_state(rank, world, "fp32")
    for dtype, state in (("fp32", PLAIN), ("bf16", SMALL)):
        _gather_in_pieces(rank, world, dtype, state)
    return {
        distributed: _several_steps(rank, world, distributed, allocated=True)
        for distributed in (False, True)
    }


def _more_cases(rank: int, world_size: int) -> None:
    """The same in all combinations, of which the others have each part."""
    world = World(rank, world_size, torch.device("cpu"))
    for distributed in (False, True):
        for bad in (float("inf"), float("nan")):
            _bad_step(rank, world, distributed, bad)
        for dtype, by_group in itertools.product(("fp32", "bf16"), (False, True)):
            _in_parts(rank, world, distributed, dtype, by_group)
    for dtype, state in itertools.product(("fp32", "bf16"), (SMALL, ON_HOST, SMALL | ON_HOST)):
        _in_parts(rank, world, True, dtype, by_group=False, state=state)
    for state in (SMALL, ON_HOST):
        _bad_step(rank, world, True, float("nan"), state)
    _other_state(rank, world, "bf16")
    _gather_in_pieces(rank, world, "bf16", PLAIN)


@pytest.mark.slow
def test_every_combination() -> None:
    run_ranks(_more_cases, 2)


def _gather_in_pieces(rank: int, world: World, dtype: str, state: State) -> None:
    """For a checkpoint: Megatron's numbers, on one host; a device holds a few at a time."""
    optimizer, most = _optimizer(world, True, dtype, state), 1000
    _put_gradients(optimizer, 0, rank)
    optimizer.reduce_gradients()
    assert optimizer.step(0.01)[0]
    held, gather_piece = [], torch.distributed.gather

    def gather(piece: torch.Tensor, *others: Any) -> object:
        held.append(world.size * piece.numel())
        return gather_piece(piece, *others)

    for part in optimizer.megatron.chained_optimizers:
        whole = part.get_parameter_state_dp_zero(use_gloo_comm=False, return_on_all_ranks=True)
        with (
            mock.patch.object(optimizer_state, "_GATHERED", most),
            mock.patch.object(torch.distributed, "gather", gather),
        ):
            gather_in_pieces(part, world.device)
            found = part.get_parameter_state_dp_zero(use_gloo_comm=True)
        assert whole is not None and (found is None) == (rank > 0)
        if found is None:
            continue
        for number in range(len(part.buffers)):
            ((dtypes, theirs),) = whole[number].items()
            for key in ("param", "exp_avg", "exp_avg_sq"):
                ours = found[number][dtypes][key][: len(theirs[key])]  # padding follows
                torch.testing.assert_close(ours, theirs[key], rtol=0, atol=0)
    num_parameters = sum(weight.numel() for weight in _weights(optimizer).values())
    assert max(held) <= most and sum(held) >= 3 * num_parameters


def _other_state(rank: int, world: World, dtype: str) -> None:
    """Against state as torch's AdamW has it: on the host bitwise, small with rounded moments."""
    plain, small, on_host, both = (
        _several_steps(rank, world, True, dtype, state)
        for state in (PLAIN, SMALL, ON_HOST, SMALL | ON_HOST)
    )
    for one, other in ((plain, on_host), (small, both)):
        for (norm, weights), (other_norm, other_weights) in zip(one, other, strict=True):
            assert norm == other_norm
            assert all((other_weights[n] == value).all() for n, value in weights.items())
    apart = [
        abs(weights[n] - value).max()
        for (_, weights), (_, small_weights) in zip(plain, small, strict=True)
        for n, value in small_weights.items()
    ]
    # Moments are rounded to 2^-9 of themselves; a bf16 weight up to 1, to 2^-8 besides.
    assert 0 < max(apart) < sum(RATES) / 10 + (2**-7 if dtype == "bf16" else 0)


def _expected(start: dict[str, np.ndarray], num_ranks: int) -> list[Seen]:
    """The same steps by torch alone."""
    parameters = {n: torch.nn.Parameter(torch.from_numpy(v).clone()) for n, v in start.items()}
    matrices = [p for p in parameters.values() if p.ndim > 1]
    vectors = [p for p in parameters.values() if p.ndim == 1]
    inner = torch.optim.AdamW(
        [
            {"params": matrices, "weight_decay": DECAY},
            {"params": vectors, "weight_decay": 0.0},
        ],
        betas=BETAS,
        eps=EPSILON,
    )
    seen = [(0.0, start)]
    for step, rate in enumerate(RATES):
        for name, parameter in parameters.items():
            shares = [_gradient(name, parameter.shape, step, rank) for rank in range(num_ranks)]
            parameter.grad = torch.stack(shares).sum(0)
        norm = torch.nn.utils.clip_grad_norm_(parameters.values(), MAX_NORM)
        for group in inner.param_groups:
            group["lr"] = rate
        inner.step()
        seen.append((float(norm), {k: v.detach().clone().numpy() for k, v in parameters.items()}))
    return seen


@pytest.fixture(scope="module")
def outcomes() -> list[dict[bool, list[Seen]]]:
    return run_ranks(_all_cases, 2)


@pytest.mark.parametrize("distributed", [False, True])
def test_steps_equal_adamw_with_clipping(outcomes, distributed: bool) -> None:
    """The bad steps, and those in parts, are asserted on the ranks themselves."""
    expected = _expected(outcomes[0][distributed][0][1], num_ranks=2)
    clipped = [norm > MAX_NORM for norm, _ in expected[1:]]
    assert any(clipped) and not all(clipped)
    for rank in outcomes:
        for (norm, weights), (true_norm, true_weights) in zip(
            rank[distributed], expected, strict=True
        ):
            assert norm == pytest.approx(true_norm, rel=NORM)
            assert weights.keys() == true_weights.keys()
            for name, values in weights.items():
                np.testing.assert_allclose(values, true_weights[name], rtol=0, atol=WEIGHTS)


def test_sharding_the_state_changes_nothing(outcomes) -> None:
    for whole, sharded in zip(outcomes[0][False], outcomes[0][True], strict=True):
        assert whole[0] == pytest.approx(sharded[0], rel=NORM)
        for name, values in whole[1].items():
            np.testing.assert_allclose(values, sharded[1][name], rtol=0, atol=WEIGHTS)


FALL = [1.0, 0.8535533905932737, 0.5, 0.14644660940672624]  # (1 + cos(k * 45 degrees)) / 2


@pytest.mark.parametrize(
    ("kind", "min_lr", "warmup", "expected"),
    [
        ("cosine", 0.001, 2, RATES),
        ("linear", 0.001, 2, [0.005, 0.01, 0.01, 0.00775, 0.0055, 0.00325]),
        ("constant", 0.0, 2, [0.005, 0.01, 0.01, 0.01, 0.01, 0.01]),
        ("cosine", 0.0, 0, [0.01 * share for share in FALL]),
        ("linear", 0.0, 0, [0.01, 0.0075, 0.005, 0.0025]),
        ("constant", 0.0, 0, [0.01] * 4),
        ("cosine", 0.0, 1, [0.01, 0.01, 0.005]),
        ("linear", 0.0, 0, [0.01]),
        ("cosine", 0.0, 3, [0.01 / 3, 0.02 / 3]),  # the warm-up may be longer than the run
    ],
)
def test_schedules_by_hand(kind: str, min_lr: float, warmup: int, expected: list[float]) -> None:
    config = OptimizerConfig(lr=0.01, min_lr=min_lr, warmup_steps=warmup, lr_scheduler_type=kind)
    found = [learning_rate(config, step, len(expected)) for step in range(len(expected))]
    assert found == pytest.approx(expected, rel=1e-12) and min(found) > 0


@pytest.mark.parametrize("kind", ["constant", "linear", "cosine"])
@pytest.mark.parametrize("warmup", [0, 3])
def test_after_the_warm_up_the_rates_are_those_of_transformers(kind: str, warmup: int) -> None:
    """Its warm-up starts at 0, a step that moves nothing; ours is one step ahead of it."""
    from transformers import get_scheduler

    num_steps, lr = 11, 0.01
    inner = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=lr)
    name = "constant_with_warmup" if kind == "constant" else kind
    schedule = get_scheduler(name, inner, num_warmup_steps=warmup, num_training_steps=num_steps)
    theirs = []
    for _ in range(num_steps):
        theirs.append(inner.param_groups[0]["lr"])
        inner.step()
        schedule.step()
    config = OptimizerConfig(lr=lr, warmup_steps=warmup, lr_scheduler_type=kind)
    ours = [learning_rate(config, step, num_steps) for step in range(num_steps)]
    assert ours[warmup:] == pytest.approx(theirs[warmup:], rel=1e-12)
    assert ours[:warmup] == pytest.approx(theirs[1 : warmup + 1], rel=1e-12)


def test_torch_s_adamw_updates_by_one_kernel() -> None:
    """What a GPU without Transformer Engine does; the numbers are the same to their rounding."""
    seed = torch.Generator().manual_seed(2)
    plain = torch.randn(1000, generator=seed, requires_grad=True)
    fused = plain.detach().clone().requires_grad_()
    optimizers = [torch.optim.AdamW([one], lr=1e-2, weight_decay=DECAY) for one in (plain, fused)]
    fuse(optimizers[1])
    kernels = []
    for _ in range(5):
        plain.grad = torch.randn(1000, generator=seed)
        fused.grad = plain.grad.clone()
        for optimizer in optimizers:
            with torch.profiler.profile(activities=[ProfilerActivity.CPU]) as seen:
                optimizer.step()
            names = [event.name for event in seen.events() or ()]
            kernels.append(names.count("aten::_fused_adamw_"))
    torch.testing.assert_close(fused, plain, rtol=1e-6, atol=1e-7)
    assert kernels == [0, 1] * 5


def test_storages_come_back_with_what_they_held() -> None:
    """On a CPU, where ``set_aside`` has no reason to do it with an optimizer's state."""
    whole = torch.arange(10, dtype=torch.float32)
    half, other = whole[5:], torch.full((3, 2), 2.5, dtype=torch.bfloat16)
    with on_host([half, other, whole]):
        assert whole.untyped_storage().nbytes() == other.untyped_storage().nbytes() == 0
    assert torch.equal(whole, torch.arange(10, dtype=torch.float32))
    assert torch.equal(other, torch.full((3, 2), 2.5, dtype=torch.bfloat16))
    half.zero_()
    assert whole.sum() == 10


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_a_device_s_memory_is_free_meanwhile() -> None:
    values = torch.randn(2**20, device="cuda")
    expected, held = values.cpu(), torch.cuda.memory_allocated()
    with on_host([values]):
        assert torch.cuda.memory_allocated() <= held - 4 * 2**20
    assert torch.cuda.memory_allocated() == held
    assert torch.equal(values.cpu(), expected)


def gradient_bytes(optimizer: Optimizer) -> int:
    wrappers: list[Any] = list(optimizer.context.wrappers)
    buffers = [buffer for wrapper in wrappers for buffer in wrapper.buffers]
    return sum(buffer.grad_data.untyped_storage().nbytes() for buffer in buffers)


def _steps_between(
    rank: int, world: World, distributed: bool, dtype: str, state: State, *, aside: bool
) -> dict[str, torch.Tensor]:
    """The weights after three steps, between which what trains is set aside, or is not."""
    optimizer = _optimizer(world, distributed, dtype, state)
    held = gradient_bytes(optimizer)
    assert held >= 4 * sum(value.numel() for value in optimizer.context.chunks[0].parameters())
    for step in range(3):
        _put_gradients(optimizer, step, rank)
        optimizer.reduce_gradients()
        assert optimizer.step(0.01)[0]
        if aside:
            with set_aside([optimizer]):
                assert gradient_bytes(optimizer) == 0
            assert gradient_bytes(optimizer) == held
    return _weights(optimizer)


def _compare(rank: int, world_size: int) -> None:
    world = World(rank, world_size, torch.device("cpu"))
    plain = [(each, dtype, PLAIN) for each in (False, True) for dtype in ("fp32", "bf16")]
    for how in (*plain, (True, "bf16", SMALL), (True, "bf16", ON_HOST)):
        one, other = (_steps_between(rank, world, *how, aside=aside) for aside in (False, True))
        assert all(torch.equal(value, other[name]) for name, value in one.items())


def test_training_goes_on_bitwise_after_what_was_set_aside() -> None:
    run_ranks(_compare, 2)
