"""Inputs of generation: requests it can answer, rows of prompts and tokens, draws, graphs."""

import re
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from megatron.core import parallel_state
from megatron.core.utils import GlobalMemoryBuffer

from puzzle_align.algos.sampling import uniform_numbers
from puzzle_align.runtime.generation.engine import _Generation
from puzzle_align.runtime.generation.inputs import DecodeState, number_prompts, prefill_input
from puzzle_align.runtime.generation.sampling import (
    Draws,
    Request,
    Sampler,
    Sampling,
    check_requests,
)
from puzzle_align.runtime.generation.step_graphs import StepGraphs, graph_batch_size, graph_length
from puzzle_align.runtime.liveness.activity import this_rank
from puzzle_align.schedules.generation import GenerationBatch
from tests.refusals import refusal
from tests.specs import LLAMA

CPU = torch.device("cpu")


@pytest.fixture
def state() -> DecodeState:
    """State of five slots in rows of a multiple of two tokens, of a rank's two chunks."""
    context = SimpleNamespace(
        device=CPU,
        dtype=torch.bfloat16,
        chunks=[SimpleNamespace(is_first=n == 0, is_last=n == 1) for n in range(2)],
        activation_shape=lambda num_tokens: (num_tokens, 1, 8),
    )
    return DecodeState(context, capacity=5, multiple=2, num_steps=3)  # pyright: ignore


def test_decoded_tokens_stand_behind_what_is_cached(state: DecodeState) -> None:
    state.begin([1, 2, 3, 4, 5], [7, 7, 7, 7, 7], 6)
    state.begin([11, 12, 13], [9, 4, 5], 4)
    row = state.row(3, 4, 16)
    assert row.tokens.tolist() == [[11, 12, 13, 0]]
    assert row.position_ids.tolist() == [[9, 4, 5, 0]]
    assert row.predictions.predict_from.tolist() == row.cached.slots.tolist() == [0, 1, 2]
    assert row.cached.positions.tolist() == [9, 4, 5]
    assert row.within is None and row.cache_length == 16


def test_a_step_starts_where_the_last_one_ended(state: DecodeState) -> None:
    """The row that was made before it sees it: that is what a graph holds."""
    state.begin([11, 12, 13], [9, 4, 5], 4)
    row = state.row(3, 4, 16)
    for step, tokens in enumerate(([21, 22, 23], [31, 32, 33])):
        state.outcomes[step, 0, :3] = torch.tensor(tokens)
        state.advance(3, step)
        assert row.tokens.tolist() == [[*tokens, 0]]
        assert row.cached.positions.tolist() == [10 + step, 5 + step, 6 + step]
        assert row.position_ids[0, 3] == 0


def test_hidden_states_have_buffers_between_chunks(state: DecodeState) -> None:
    for buffer in (state.sent(0, (4, 1, 8)), state.received(1, (4, 1, 8))):
        assert (buffer.shape, buffer.dtype) == ((4, 1, 8), torch.bfloat16)
    for get, end in ((state.received, 0), (state.sent, 1)):
        with pytest.raises(AssertionError, match="no neighbour on this side"):
            get(end, (4, 1, 8))


def test_draws_come_to_their_place(state: DecodeState) -> None:
    numbers, too_short = torch.rand(3, dtype=torch.float64), torch.tensor([True, False, True])
    placed = state.draws(Draws(numbers, too_short), 5)
    assert placed.numbers is not None and placed.too_short is not None
    assert placed.numbers.shape == placed.too_short.shape == (5,)
    assert torch.equal(placed.numbers[:3], numbers) and torch.equal(placed.too_short[:3], too_short)
    again = state.draws(Draws(numbers.flip(0), None), 5)
    assert again.too_short is None and again.numbers is not None
    assert again.numbers.data_ptr() == placed.numbers.data_ptr()
    assert torch.equal(placed.numbers[:3], numbers.flip(0))


def test_draws_of_several_steps_are_those_of_each() -> None:
    sampling = Sampling(0.7, 0, 1.0, 6, 20, (3,), seed=9)
    ids, places = np.array([4, 8, 1]), np.array([2, 5, 7])
    draws = Sampler(sampling, CPU).draws(ids, places, 5)
    for step, draw in enumerate(draws):
        assert draw.numbers is not None
        assert draw.numbers.tolist() == uniform_numbers(9, ids, places + step).tolist()
        short = places + step < 6
        assert (draw.too_short is None) == (not short.any())
        assert draw.too_short is None or draw.too_short.tolist() == short.tolist()


def test_the_likeliest_tokens_need_no_draws() -> None:
    sampler = Sampler(Sampling(0.0, 0, 1.0, 6, 20, (), seed=9), CPU)
    assert sampler.draws(np.arange(2), np.zeros(2, int), 2) == [Draws(None, None)] * 2


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"), [(0.0, 0, 1.0), (0.5, 1, 1.0), (0.5, 0, 0.5)]
)
def test_next_tokens_are_the_likeliest_that_may_come(
    temperature: float, top_k: int, top_p: float
) -> None:
    """The first sequence must not stop yet; log-probabilities are those of all tokens."""
    sampler = Sampler(Sampling(temperature, top_k, top_p, 6, 20, (1,), seed=9), CPU)
    logits = torch.tensor([[0.0, 3.0, 1.0, 2.0]] * 2)
    numbers = torch.full((2,), 0.001, dtype=torch.float64) if temperature else None
    found, log_probs = sampler.next_tokens(logits, Draws(numbers, torch.tensor([True, False])))
    assert found.tolist() == [3, 1]
    expected = torch.log_softmax(logits.double() / (temperature or 1.0), dim=-1)
    torch.testing.assert_close(log_probs, expected[[0, 1], [3, 1]])


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a host without CUDA")
def test_a_step_that_cannot_be_captured_has_a_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    graphs, ran = StepGraphs(), []
    graphs.run("key", lambda: ran.append(1))
    with pytest.raises(
        RuntimeError, match=r"decode step: set generation.enforce_eager=true \(\S+ .*\)$"
    ):
        graphs.run("key", lambda: ran.append(2))
    assert ran == [1]


def test_an_error_of_earlier_work_is_not_the_capture_s(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise RuntimeError("an illegal memory access")

    monkeypatch.setattr(torch.cuda, "synchronize", fail)
    graphs = StepGraphs()
    graphs.run("key", lambda: None)
    with pytest.raises(RuntimeError, match=r"^an illegal memory access$"):
        graphs.run("key", lambda: None)


class FakeGraph:
    """A CUDA graph that notes its replays."""

    def __init__(self) -> None:
        self.num_replays = 0

    def replay(self) -> None:
        self.num_replays += 1


def test_a_rank_that_waits_for_its_device_before_a_capture_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else the watch could take it for the one that hangs: its default stream may be idle."""
    steps: list[bool] = []
    monkeypatch.setattr(parallel_state, "_GLOBAL_MEMORY_BUFFER", GlobalMemoryBuffer())
    for name, fake in {
        "graph_pool_handle": lambda: None,
        "CUDAGraph": FakeGraph,
        "graph": lambda *_args, **_named: nullcontext(),
        "synchronize": lambda: steps.append(this_rank.is_waiting),
    }.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    graphs = StepGraphs()
    for _ in range(2):
        graphs.run("key", lambda: steps.append(this_rank.is_waiting))
    assert steps == [False, True, False], "a step, the wait, the capture"


def test_all_graphs_share_a_pool_and_are_captured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    captured, pools = [], iter([(0, 1), (0, 2)])

    def capture(graph: FakeGraph, **options: object) -> nullcontext[None]:
        captured.append((graph, options))
        return nullcontext()

    monkeypatch.setattr(parallel_state, "_GLOBAL_MEMORY_BUFFER", GlobalMemoryBuffer())
    for name, fake in {
        "graph_pool_handle": lambda: next(pools),
        "CUDAGraph": FakeGraph,
        "graph": capture,
        "synchronize": lambda: None,
    }.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    graphs, ran = StepGraphs(), []
    for key in (1, 2, 1, 2, 1):
        graphs.run(key, lambda key=key: ran.append(key))
    assert ran == [1, 2, 1, 2], "each eagerly, then at its capture"
    assert [graph.num_replays for graph, _ in captured] == [2, 1]
    options = {"pool": (0, 1), "capture_error_mode": "thread_local"}
    assert [own for _, own in captured] == [options, options]


@pytest.mark.parametrize(
    ("error", "reason"), [("no memory\n0 bytes free", "no memory"), ("", "RuntimeError")]
)
def test_the_first_error_of_a_capture_is_the_one_to_report(error: str, reason: str) -> None:
    class Failing(StepGraphs):
        def _wait(self) -> None:
            pass

        def _captured(self, step: Callable[[], object]) -> torch.cuda.CUDAGraph:
            try:
                step()
            finally:
                raise RuntimeError("the capture is invalid")

    def step() -> None:
        raise RuntimeError(error)

    graphs = Failing()
    graphs.run("key", lambda: None)
    with pytest.raises(RuntimeError, match=rf"\({reason}\)$"):
        graphs.run("key", step)


@given(st.integers(1, 10000), st.integers(1, 10000))
def test_graphs_have_few_sizes_and_little_padding(number: int, limit: int) -> None:
    number = min(number, limit)
    assert number <= graph_batch_size(number, limit) <= min(2 * number, limit)
    longest = -(-limit // 8) * 8
    length = graph_length(number, longest)
    assert number <= length <= min(longest, max(128, 1.5 * number))
    assert length % 8 == 0


def test_the_sizes_by_hand() -> None:
    assert sorted({graph_batch_size(n, 48) for n in range(1, 49)}) == [1, 2, 4, 8, 16, 32, 48]
    lengths = sorted({graph_length(n, 1000) for n in range(1, 1001)})
    assert lengths == [128, 192, 256, 384, 512, 768, 1000]
    assert all(graph_length(n, 1000) == n < graph_length(n + 1, 1001) for n in lengths)


def test_a_batch_s_graphs_have_one_shape_which_has_room_for_all_its_steps() -> None:
    """Eight steps of three sequences, the longest of 120 or 121 tokens, in rows of even sizes."""
    generation: Any = SimpleNamespace(
        _graphs=StepGraphs(),
        _multiple=2,
        _schedule=SimpleNamespace(capacities=[5]),
        _caches=[[SimpleNamespace(max_length=304)]],
    )

    def shapes(longest: int) -> set[tuple[int, int, int]]:
        batch = GenerationBatch(0, 0, False, (6, 7, 8), 0, (9, longest, 9), (), num_steps=8)
        return {_Generation._decode_shape(generation, batch, step) for step in range(8)}

    assert shapes(120) == {(4, 4, 128)} and shapes(121) == {(4, 4, 192)}
    generation._graphs = None
    assert shapes(120) == {(3, 4, 128)} and shapes(121) == {(3, 4, 128), (3, 4, 136)}


A, B = np.array([7, 8, 9], dtype=np.int32), np.array([5, 6], dtype=np.int32)


def test_equal_neighbours_share_a_number() -> None:
    assert number_prompts([A, A.copy(), B, A, A[:2], A[:2]]) == [0, 0, 1, 2, 3, 3]


def test_a_shared_prompt_is_computed_once_for_all_its_slots() -> None:
    batch = GenerationBatch(0, 0, True, (3, 4, 5), 2, (0, 0, 0), ())
    row = prefill_input(batch, [A, A, B], 4, CPU)
    assert row.tokens.tolist() == [[7, 8, 9, 5, 6, 0, 0, 0]]
    assert row.position_ids[0, :5].tolist() == [0, 1, 2, 0, 1]
    assert row.predictions.predict_from.tolist() == [2, 2, 4]
    assert isinstance(row.cached.sources, torch.Tensor)
    assert row.cached.sources.tolist() == [0, 1, 2, 0, 1, 2, 3, 4]
    assert row.cached.slots.tolist() == [2, 2, 2, 3, 3, 3, 4, 4]
    assert row.cached.positions.tolist() == [0, 1, 2, 0, 1, 2, 0, 1]
    assert row.cache_length == 3


SPEC = replace(LLAMA, vocab_size=50, max_position_embeddings=20)


def check(prompt: list[int], stop_token: int = 0, sliding_window: int | None = None) -> None:
    spec = replace(SPEC, sliding_window=sliding_window)
    sampling = Sampling(1.0, 0, 1.0, 0, 8, (stop_token,), seed=0)
    requests = [Request(1, np.array([3])), Request(7, np.array(prompt, dtype=np.int32))]
    check_requests(spec, requests, sampling)


def test_the_longest_prompt_is_answered() -> None:
    check([49] * 12)
    check([0] * 7, sliding_window=15)


@pytest.mark.parametrize(
    ("prompt", "stop_token", "window", "message"),
    [
        ([], 0, None, "the prompt of request 7 is empty"),
        ([1] * 13, 0, None, "request 7 has 13 tokens.*max_new_tokens=8 .*20 positions"),
        ([1] * 8, 0, 15, "15 positions"),
        ([1, 50], 0, None, "tokens from 1 to 50, but the model's are 0 to 49"),
        ([3, -1], 0, None, "tokens from -1 to 3"),
        ([1], 50, None, "stop_token_ids: 50 is no token"),
        ([1], -1, None, "stop_token_ids: -1 is no token"),
    ],
)
def test_others_are_refused(
    prompt: list[int], stop_token: int, window: int | None, message: str
) -> None:
    assert re.search(message, refusal(lambda: check(prompt, stop_token, window)))
