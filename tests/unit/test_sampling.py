"""Sampling: frequencies are the probabilities, cuts keep what they should, numbers are uniform."""

from typing import Any

import numpy as np
import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from puzzle_align.algos.sampling import (
    choose_likeliest,
    draw,
    forbid_tokens,
    token_log_probs,
    uniform_numbers,
)
from puzzle_align.planning.memory.job import SAMPLING_BYTES
from puzzle_align.runtime.generation.sampling import Draws, Sampler, Sampling

LOGITS = torch.tensor([2.0, 0.5, 2.0, -1.0, 0.0, 1.0, -torch.inf])


def cut(weights: np.ndarray, top_k: int, top_p: float) -> np.ndarray:
    """The distribution that is left, by the definitions; ties at the bound stay."""
    if top_k:
        weights = np.where(weights >= np.sort(weights)[-top_k], weights, 0)
    weights = weights / weights.sum()
    largest = np.sort(weights)[::-1]
    needed = int(np.searchsorted(largest.cumsum(), top_p - 1e-12)) + 1
    weights = np.where(weights >= largest[min(needed, len(weights)) - 1], weights, 0)
    return weights / weights.sum()


@pytest.mark.parametrize("temperature", [1.0, 0.5, 2.0])
@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (3, 1.0), (0, 0.7), (4, 0.6), (1, 1.0)])
def test_frequencies_are_the_probabilities(temperature: float, top_k: int, top_p: float) -> None:
    num_draws = 40_000
    ids = np.arange(num_draws) % 200
    numbers = torch.from_numpy(uniform_numbers(3, ids, np.arange(num_draws) // 200))
    logits = LOGITS.expand(num_draws, -1)
    tokens = draw(logits, numbers, temperature=temperature, top_k=top_k, top_p=top_p)
    expected = cut(np.exp(LOGITS.double().numpy() / temperature), top_k, top_p) * num_draws
    counts = np.bincount(tokens.numpy(), minlength=len(LOGITS))
    possible = expected > 0
    assert not counts[~possible].any()
    chi_square = ((counts - expected)[possible] ** 2 / expected[possible]).sum()
    assert chi_square < 23  # of up to 5 degrees of freedom: exceeded once in 3000 draws


@pytest.mark.parametrize(("top_k", "top_p"), [(50, 1.0), (0, 0.9), (200, 0.8)])
def test_ranks_of_logits_are_those_of_probabilities(top_k: int, top_p: float) -> None:
    """Of large vocabularies with many ties (bf16), and of logits that differ in the last bit."""
    seed = torch.Generator().manual_seed(1)
    logits = torch.randn(8, 4096, generator=seed).mul(4).bfloat16().float()
    logits[:, 1::7] = torch.nextafter(logits[:, ::7], torch.tensor(torch.inf))[:, : 4096 // 7]
    numbers = torch.rand(8, generator=seed, dtype=torch.float64)
    tokens = draw(logits, numbers, temperature=0.7, top_k=top_k, top_p=top_p)
    for row, token, number in zip(logits, tokens.tolist(), numbers.tolist(), strict=True):
        weights = cut(torch.softmax(row.double() / 0.7, 0).numpy(), top_k, top_p)
        below, upto = weights[:token].sum(), weights[: token + 1].sum()
        assert below - 1e-12 <= number <= upto + 1e-12 and weights[token] > 0


class InFloat64(TorchDispatchMode):
    """Names of operations that read float64 tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = (each for each in args if isinstance(each, torch.Tensor))
        if any(tensor.dtype is torch.float64 for tensor in tensors):
            self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def test_tokens_are_ranked_in_float32_and_nothing_is_divided_by_1() -> None:
    logits = LOGITS.expand(2, -1)
    numbers = torch.tensor([0.1, 0.9], dtype=torch.float64)
    with InFloat64() as operations:
        forbidden = forbid_tokens(logits, torch.tensor([1]), torch.tensor([True, False]))
        choose_likeliest(forbidden)
        tokens = draw(forbidden, numbers, temperature=1.0, top_k=4, top_p=0.9)
        token_log_probs(logits, tokens, 1.0)
    assert {"_softmax", "cumsum"} <= operations.names
    ranking = {"topk", "sort", "argsort", "argmax", "index_copy", "div"}
    assert not operations.names & ranking


class Alive(TorchDispatchMode):
    """Most bytes of tensors at the end of an operation, by its name."""

    def __init__(self) -> None:
        super().__init__()
        self.most: dict[str, int] = {}
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves((args, result)):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                self._storages[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        alive = sum(size for storage, size in self._storages.values() if not storage.expired())
        name = func.overloadpacket.__name__
        self.most[name] = max(self.most.get(name, 0), alive)
        return result


def test_sampling_takes_the_memory_that_estimates_count() -> None:
    """By the entries of the vocabulary: float32 logits, a copy, float64 weights, and a sort."""
    sampler = Sampler(Sampling(0.7, 50, 0.9, 4, 8, (3,), seed=0), torch.device("cpu"))
    numbers, too_short = torch.rand(8, dtype=torch.float64), torch.ones(8, dtype=torch.bool)
    with Alive() as alive:
        sampler.next_tokens(torch.randn(8, 4096), Draws(numbers, too_short))
    most = {name: size // (8 * 4096) for name, size in alive.most.items()}
    held, results = 4 + 4 + 8, 4 + 8
    assert most["sort"] == held + results and max(most.values()) == 34
    # For fewer than 128 sequences (SortStable.cu): places and segments twice, keys, and the radix
    # sort's other keys and values.
    buffers = 2 * 8 + 4 + (4 + 8)
    assert held + results + buffers == SAMPLING_BYTES


def test_a_draw_inverts_the_cumulative_distribution() -> None:
    logits = torch.log(torch.tensor([[0.25, 0.5, 0.25]], dtype=torch.float64)).expand(7, -1)
    numbers = torch.tensor([0.0, 0.2499, 0.2501, 0.7499, 0.7501, 1 - 2**-53, 0.5])
    tokens = draw(logits, numbers.double(), temperature=1.0, top_k=0, top_p=1.0)
    assert tokens.tolist() == [0, 0, 1, 1, 2, 2, 1]


def test_tokens_without_probability_are_never_drawn() -> None:
    logits = torch.tensor([[-torch.inf, 1.0, -torch.inf]]).expand(2, -1)
    numbers = torch.tensor([0.0, 1 - 2**-53], dtype=torch.float64)
    assert draw(logits, numbers, temperature=1.0, top_k=0, top_p=1.0).tolist() == [1, 1]


@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (2, 1.0), (0, 0.5)])
def test_logits_that_are_not_numbers_give_a_token(top_k: int, top_p: float) -> None:
    """A diverged model ends the job in its own line, not by an index out of range."""
    logits = torch.full((2, 5), torch.nan)
    numbers = torch.tensor([0.0, 0.9], dtype=torch.float64)
    tokens = draw(logits, numbers, temperature=1.0, top_k=top_k, top_p=top_p)
    assert tokens.shape == (2,) and tokens.min() >= 0 and tokens.max() < 5


def test_greedy_takes_the_lowest_of_equals() -> None:
    assert choose_likeliest(torch.stack([LOGITS, LOGITS.flip(0)])).tolist() == [0, 4]


def test_forbidden_tokens_leave_other_rows_alone() -> None:
    logits = torch.arange(6.0).view(2, 3)
    got = forbid_tokens(logits, torch.tensor([2, 0]), torch.tensor([True, False]))
    assert got.tolist() == [[-torch.inf, 1.0, -torch.inf], [3.0, 4.0, 5.0]]
    assert logits[0, 0] == 0


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_are_of_the_whole_vocabulary(temperature: float) -> None:
    expected = torch.log_softmax(LOGITS.double() / temperature, -1)
    got = token_log_probs(LOGITS.expand(3, -1), torch.tensor([0, 3, 5]), temperature)
    # Float64, of numbers of order one: each of a few roundings is 1e-16.
    torch.testing.assert_close(got, expected[[0, 3, 5]], rtol=0, atol=1e-12)


def test_numbers_are_those_of_splitmix64() -> None:
    def mixed(state: int) -> int:
        mask = 2**64 - 1
        state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 & mask
        state = (state ^ (state >> 27)) * 0x94D049BB133111EB & mask
        return state ^ (state >> 31)

    golden = 0x9E3779B97F4A7C15
    assert mixed(golden) == 0xE220A8397B1DCDAF  # the published first output of seed 0
    for seed, sequence, place in [(0, 0, 0), (7, 12, 300), (2**63 + 5, 2**40, 1)]:
        start = mixed((seed + golden) % 2**64)
        state = mixed((start + golden * (sequence + 1)) % 2**64)
        bits = mixed((state + golden * (place + 1)) % 2**64)
        got = uniform_numbers(seed, np.array([sequence]), np.array([place]))
        assert got[0] == (bits >> 11) * 2.0**-53


def test_numbers_are_uniform_and_of_their_own() -> None:
    ids, places = (axis.ravel() for axis in np.mgrid[0:300, 0:300])
    numbers = uniform_numbers(1, ids, places)
    assert len(np.unique(numbers)) == len(numbers)
    counts = np.histogram(numbers, bins=100, range=(0, 1))[0]
    assert ((counts - 900) ** 2 / 900).sum() < 160  # 99 degrees of freedom
    grid = numbers.reshape(300, 300)
    for a, b in [(grid[1:], grid[:-1]), (grid[:, 1:], grid[:, :-1]), (grid, grid.T)]:
        off = ~np.eye(*a.shape, dtype=bool)
        assert abs(np.corrcoef(a[off], b[off])[0, 1]) < 0.015
    other = uniform_numbers(2, ids, places)
    assert abs(np.corrcoef(numbers, other)[0, 1]) < 0.015
