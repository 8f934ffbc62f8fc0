"""Several steps between two looks of the host, and steps as graphs: the same tokens as one by one.

Where responses end at their limit alone, batches are the same whatever the steps, and so is every
bit. After a stop token a response's slot stays taken up to the next look: other batch sizes round
otherwise. No step on a GPU may make the host wait: CUDA's synchronizing calls are errors within.
"""

import gc
import weakref
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from megatron.core.parallel_state import _set_global_memory_buffer, get_global_memory_buffer
from megatron.core.tensor_parallel import random

from puzzle_align.layout.model import Dtype, ModelOptions
from puzzle_align.layout.plan import ParallelPlan
from puzzle_align.runtime.context import Context
from puzzle_align.runtime.generation import engine
from puzzle_align.runtime.generation.engine import generate
from puzzle_align.runtime.generation.sampling import Request, Response, Sampling
from puzzle_align.runtime.generation.step_graphs import StepGraphs
from puzzle_align.runtime.groups.world import World
from puzzle_align.runtime.liveness.failure import CannotGoOn
from puzzle_align.schedules.generation import GenerationBatch
from tests.dist.chunk_runs import SIZES, VARIANTS, save_model
from tests.dist.spawn import run_ranks
from tests.dist.test_generation import context_of, noted_batches
from tests.specs import PAPER

PLANS = {
    "(1,1,1)": ParallelPlan(),
    "(2,1,1)": ParallelPlan(pipeline=2),
    "(2,1,1) interleaved": ParallelPlan(pipeline=2, virtual_pipeline=2),
    "(1,1,2)": ParallelPlan(tensor=2),
    "(1,1,2) sequence parallel": ParallelPlan(tensor=2, sequence_parallel=True),
    "(2,1,2) sequence parallel": ParallelPlan(pipeline=2, tensor=2, sequence_parallel=True),
}
STOPS = tuple(range(0, 300, 11))
SAMPLINGS = {
    "whole": Sampling(0.9, 0, 1.0, 0, 15, (), seed=3),
    "greedy": Sampling(0.0, 0, 1.0, 0, 15, STOPS, seed=0),
    "not too short": Sampling(0.0, 0, 1.0, 6, 15, STOPS, seed=0),
    "drawn": Sampling(1.1, 40, 0.9, 3, 15, STOPS, seed=4),
    "long": Sampling(0.0, 0, 1.0, 0, 120, (), seed=0),  # passes a graph's smallest length
    "one token": Sampling(1.0, 0, 1.0, 0, 1, STOPS, seed=5),
}
ALL, FEW, ONE_BY_ONE = (64, 16), (16, 3), (1, 2)  # prefill_tokens, decode_batch_size
# The plan of tensor ranks has the fewest: a step has many of their collectives, which are slow on a
# CPU. A prompt's batch gives the first of 15 tokens: neither 3 nor 8 divide the rest.
CASES = {
    "(1,1,1)": [
        *(("whole", FEW), ("greedy", ONE_BY_ONE), ("not too short", FEW)),
        *(("drawn", FEW), ("one token", ALL)),
    ],
    "(2,1,1)": [("whole", FEW), ("greedy", ONE_BY_ONE), ("drawn", FEW), ("long", ALL)],
    "(2,1,1) interleaved": [("whole", ALL), ("drawn", FEW)],
    "(1,1,2)": [("not too short", FEW)],
    "(1,1,2) sequence parallel": [("whole", ALL), ("drawn", FEW)],
    "(2,1,2) sequence parallel": [("drawn", FEW)],
}
NUM_STEPS = {
    "(1,1,1)": (3, 8),
    "(2,1,1)": (2, 8, 2**31 - 1),  # the last: the greatest that is allowed
    "(2,1,1) interleaved": (3,),
    "(1,1,2)": (3,),
    "(1,1,2) sequence parallel": (3,),
    "(2,1,2) sequence parallel": (3,),
}
LENGTHS = (3, 17, 17, 17, 1, 9, 30, 5)
ROUNDING = 1e-5  # of log-probabilities, by batches of other sizes
Answers = list[Response]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_model(folder, *VARIANTS["llama grouped"], seed=1)
    return folder


def requests() -> list[Request]:
    """Ragged; the second to fourth have one prompt."""
    generator = np.random.default_rng(6)
    prompts = [generator.integers(0, SIZES["vocab_size"], length) for length in LENGTHS]
    prompts[2] = prompts[3] = prompts[1]
    return [Request(10 + 3 * number, prompt) for number, prompt in enumerate(prompts)]


def answers(
    context: Context,
    sampling: Sampling,
    sizes: tuple[int, int],
    steps: int | None,
    enforce_eager: bool = False,
) -> Answers:
    return generate(
        context,
        requests(),
        sampling,
        prefill_tokens=sizes[0],
        decode_batch_size=sizes[1],
        num_scheduler_steps=steps,
        enforce_eager=enforce_eager,
    )


def same(found: Answers, wanted: Answers, *, bitwise: bool, rounding: float = ROUNDING) -> None:
    for own, other in zip(found, wanted, strict=True):
        assert own.id == other.id and own.stopped == other.stopped
        assert own.tokens.tolist() == other.tokens.tolist()
        assert not bitwise or own.log_probs.tobytes() == other.log_probs.tobytes()
        np.testing.assert_allclose(own.log_probs, other.log_probs, rtol=0, atol=rounding)


def _in_all_ways(
    rank: int, world_size: int, folder: Path, label: str, names: tuple[str, ...]
) -> list[tuple[int, int]]:
    """Raises where several steps, or graphs, give other tokens than single steps.

    Returns how many steps were captured, and replayed, in each generation with graphs.
    """
    plan, counts = PLANS[label], []
    context = context_of(folder, plan, World(rank, world_size, torch.device("cpu")))
    for name in names:
        sampling, sizes = SAMPLINGS[name], dict(CASES[label])[name]
        wanted = answers(context, sampling, sizes, None)
        lengths = {len(response.tokens) for response in wanted}
        assert name in ("whole", "long", "one token") or len(lengths) > 2
        for steps in NUM_STEPS[label]:
            with noted_batches() as batches:
                found = answers(context, sampling, sizes, steps)
            same(found, wanted, bitwise=not sampling.stop_token_ids)
            # The prompts' batch gives the first token.
            longest = max(1, min(steps, sampling.max_new_tokens - 1))
            assert max(batch.num_steps for batch in batches) == longest
        counts += _as_graphs(context, name, sizes, wanted)
    if plan.world_size == 1:
        wanted = answers(context, SAMPLINGS["long"], ALL, None)
        counts += _as_graphs(context, "long", ALL, wanted)
    if plan.pipeline == 1:
        _diverges(context)
    return counts


def _diverges(context: Context) -> None:
    """Once some responses have ended, the model does: the look after the next steps finds it out.

    Of one slot group only: what another has on the wire is dropped with the error. gloo never sends
    that; its thread spins, and the rank that waits for it waits on.
    """
    collect = engine._Generation._collect
    finished: list[int] = []

    def collect_and_diverge(self: Any, batch: GenerationBatch) -> None:
        collect(self, batch)
        tokens, longest = self._tokens, SAMPLINGS["greedy"].max_new_tokens
        ended = [t for t in tokens if len(t) == longest or {*t[-1:]} & self._stop_tokens]
        if ended and not finished:
            finished.append(len(ended))
            for parameter in context.chunks[-1].decoder.parameters():
                parameter.fill_(torch.nan)

    engine._Generation._collect = collect_and_diverge
    try:
        with pytest.raises(CannotGoOn, match="not finite"):
            answers(context, SAMPLINGS["greedy"], ALL, 8)
    finally:
        engine._Generation._collect = collect
    assert finished[0] < len(LENGTHS)


class _Replayed:
    """A step to be replayed as it was captured, with the tensors of then."""

    def __init__(self, step: Callable[[], object], caches: Callable[[], list[list[int]]]) -> None:
        self._step, self._caches = step, caches
        self._captured = caches()
        self._buffers = [weakref.ref(each) for each in get_global_memory_buffer().buffer.values()]

    def replay(self) -> None:
        assert all(buffer() is not None for buffer in self._buffers), "freed under a graph"
        for now, then in zip(self._caches(), self._captured, strict=True):
            if any(then):  # else the group had not begun
                assert now in ([], then), "the cache has moved under a graph"
        with pytest.MonkeyPatch.context() as patch:  # as torch does while CUDA captures
            for name in ("_get_cuda_rng_state", "_set_cuda_rng_state"):
                patch.setattr(random, name, _refuse)
            self._step()


def _refuse(*_args: object, **_named: object) -> None:
    raise AssertionError("a graph reads or sets a random state")


class _HostGraphs(StepGraphs):
    """Graphs on the host: what a step did not leave where it was when captured is missing."""

    def __init__(self) -> None:
        super().__init__()
        self.num_replays = 0
        self.ran: list[tuple[Hashable, bool]] = []  # and whether as a graph
        self.captured: list[Hashable] = []
        self.caches: Callable[[], list[list[int]]] = list
        self.input: Callable[[Hashable], int | None] = lambda _: None
        self._inputs: dict[Hashable, int | None] = {}

    def run(self, key: Hashable, step: Callable[[], object]) -> None:
        address = self.input(key)
        assert self._inputs.setdefault(key, address) == address, "the input has moved under a graph"
        if key in self._graphs and self._graphs[key] is None:
            self.captured.append(key)
        super().run(key, step)
        self.ran.append((key, self._graphs[key] is not None))
        self.num_replays += self._graphs[key] is not None

    def _wait(self) -> None:
        pass  # a CPU's work is done

    def _captured(self, step: Callable[[], object]) -> _Replayed:  # pyright: ignore
        return _Replayed(step, self.caches)


@contextmanager
def host_graphs() -> Iterator[list[_HostGraphs]]:
    """Every generation within has graphs."""
    made: list[_HostGraphs] = []
    plain = engine._Generation

    class WithGraphs(plain):
        def __init__(self, *args: object) -> None:
            *others, none = args
            assert none is None, "a CPU has no graphs"
            graphs = _HostGraphs()
            super().__init__(*others, graphs)  # pyright: ignore
            graphs.caches, graphs.input = self._addresses, self._input
            made.append(graphs)

        def _reserve(self, group: int, length: int) -> None:
            super()._reserve(group, length)
            for cache in self._caches[group]:
                assert cache.length == cache.max_length, "a graph's cache grows"

        def _addresses(self) -> list[list[int]]:
            """Addresses of every group's buffers; none of a group that has no more work."""
            return [
                [tensor.data_ptr() for cache in group for tensor in cache.keys]
                for group in self._caches
            ]

        def _input(self, key: Any) -> int | None:
            """Address of the hidden states that a step's chunk has received; None: it is first."""
            hidden = self._context.chunks[key[1]].decoder.input_tensor
            return None if hidden is None else hidden.data_ptr()

    engine._Generation = WithGraphs
    try:
        yield made
    finally:
        engine._Generation = plain


def _as_graphs(
    context: Context, name: str, sizes: tuple[int, int], wanted: Answers
) -> list[tuple[int, int]]:
    counts = []
    for steps in (1, 8):
        get_global_memory_buffer().buffer.clear()
        with host_graphs() as made:
            found = answers(context, SAMPLINGS[name], sizes, steps)
        same(found, wanted, bitwise=False)
        captured = made[0].captured
        assert len({*captured}) == len(captured), "a step was captured again"
        ran: list[object] = [None] * context.plan.tensor
        dist.all_gather_object(ran, made[0].ran, group=context.groups.tp)
        assert all(each == ran[0] for each in ran), "tensor ranks ran other graphs"
        counts.append((len(captured), made[0].num_replays))
    return counts


@pytest.mark.parametrize(
    ("label", "names"),
    [
        ("(2,1,1)", ("drawn",)),
        ("(1,1,2)", ("not too short",)),
        ("(1,1,2) sequence parallel", ("whole", "drawn")),
        # Others have each part of them: steps, graphs, stop tokens, a plan of either kind.
        *(
            pytest.param(label, names, marks=pytest.mark.slow)
            for label, names in (
                ("(1,1,1)", ("whole", "greedy", "not too short", "drawn", "one token")),
                ("(2,1,1)", ("whole", "greedy", "long")),
                ("(2,1,1) interleaved", ("whole", "drawn")),
                ("(2,1,2) sequence parallel", ("drawn",)),
            )
        ),
    ],
)
def test_tokens_depend_neither_on_the_steps_between_looks_nor_on_graphs(
    model: Path, label: str, names: tuple[str, ...]
) -> None:
    plan = PLANS[label]
    for counts in run_ranks(_in_all_ways, plan.world_size, model, label, names):
        captured, replays = np.array(counts).sum(axis=0)
        assert replays > 3 * captured > 0


class _Graph:
    """Stand-in for a captured step."""


class _Eager(StepGraphs):
    """Keeps a graph of every step, which runs eagerly all the same."""

    def __init__(self, made: list["weakref.ref[_Graph]"]) -> None:
        super().__init__()
        self._made = made

    def run(self, key: Hashable, step: Callable[[], object]) -> None:
        step()
        if key not in self._graphs:
            self._graphs[key] = graph = _Graph()  # pyright: ignore
            self._made.append(weakref.ref(graph))


def _ends_with_its_graphs(rank: int, world_size: int, folder: Path) -> int:
    context = context_of(folder, ParallelPlan(), World(rank, world_size, torch.device("cpu")))
    plain, made = engine._Generation, []

    class WithGraphs(plain):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args[:-1], _Eager(made))  # pyright: ignore

    engine._Generation = WithGraphs
    gc.disable()
    found = answers(context, SAMPLINGS["greedy"], FEW, 8)
    assert found and not any(graph() for graph in made), "a graph is left"
    return len(made)


def test_no_graph_outlives_its_generation(model: Path) -> None:
    """NCCL waits for a graph's end before it destroys the communicator of its collectives.

    So graphs end at once, not when Python next looks for cycles of objects.
    """
    assert run_ranks(_ends_with_its_graphs, 1, model)[0] > 1


@pytest.mark.parametrize(
    ("tensor", "enforce_eager", "expected"), [(1, False, True), (2, False, True), (2, True, False)]
)
def test_which_generations_have_graphs(
    tensor: int, enforce_eager: bool, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, device = ParallelPlan(tensor=tensor), torch.device("cuda")
    context: Any = SimpleNamespace(spec=PAPER, plan=plan, device=device, chunks=[])
    made = Mock()
    monkeypatch.setattr(engine, "_Generation", made)
    generate(
        *(context, [], SAMPLINGS["whole"]),
        prefill_tokens=1,
        decode_batch_size=1,
        enforce_eager=enforce_eager,
    )
    assert isinstance(made.call_args.args[-1], StepGraphs) == expected


needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
LONG = ("long", ALL)


class _Watched(StepGraphs):
    """Counts what is captured; a step that waits for the device fails."""

    num_captured = 0

    def run(self, key: Hashable, step: Callable[[], object]) -> None:
        def without_waiting() -> None:
            torch.cuda.set_sync_debug_mode("error")
            try:
                step()
            finally:
                torch.cuda.set_sync_debug_mode("default")

        super().run(key, without_waiting)

    def _captured(self, step: Callable[[], object]) -> torch.cuda.CUDAGraph:
        _Watched.num_captured += 1
        return super()._captured(step)


def _on_one_gpu(rank: int, world_size: int, folder: Path, dtype: Dtype) -> None:
    engine.StepGraphs = _Watched
    world = World(rank, world_size, torch.device("cuda", 0))
    torch.cuda.set_device(0)
    context = context_of(folder, ParallelPlan(), world, ModelOptions(dtype=dtype))
    for name, sizes in [*CASES["(1,1,1)"], LONG]:
        sampling = SAMPLINGS[name]
        wanted = answers(context, sampling, sizes, 1, enforce_eager=True)
        before = _Watched.num_captured
        for steps, eager in ((1, False), (8, False), (8, True), (None, False)):
            found = answers(context, sampling, sizes, steps, enforce_eager=eager)
            if dtype == "fp32":
                same(found, wanted, bitwise=False, rounding=1e-4)
            assert all(np.isfinite(response.log_probs).all() for response in found)
        assert (_Watched.num_captured > before) == (name != "one token")


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize(
    ("dtype", "family"), [("fp32", "llama grouped"), ("fp32", "gemma"), ("bf16", "llama grouped")]
)
def test_graphs_have_the_tokens_of_single_launches(dtype: str, family: str, tmp_path: Path) -> None:
    """In bf16 other batch sizes round so much otherwise that tokens part: no more than finite."""
    save_model(tmp_path, *VARIANTS[family], seed=1)
    run_ranks(_on_one_gpu, 1, tmp_path, dtype, fresh=True)


def _waits_within_a_graph(rank: int, world_size: int) -> None:
    torch.cuda.set_device(0)
    value, graphs = torch.ones(3, device="cuda"), StepGraphs()
    graphs.run("key", value.tolist)
    with pytest.raises(RuntimeError, match="decode step: set generation.enforce_eager=true"):
        graphs.run("key", value.tolist)


@pytest.mark.gpu
@needs_cuda
def test_a_step_that_cannot_be_captured_has_a_cure() -> None:
    run_ranks(_waits_within_a_graph, 1, fresh=True)


def _collects_within_a_graph(rank: int, world_size: int) -> list[float]:
    torch.cuda.set_device(0)
    _set_global_memory_buffer()  # as a model's communicators do
    group = dist.new_group([0], backend="nccl")
    value, gathered, graphs = *torch.zeros(2, 3, device="cuda"), StepGraphs()

    def step() -> None:
        value.add_(1)
        dist.all_reduce(value, group=group)
        dist.all_gather_into_tensor(gathered, value, group=group)

    for _ in range(5):
        graphs.run("key", step)
    return gathered.tolist()


@pytest.mark.gpu
@needs_cuda
def test_a_graph_holds_collectives_of_nccl() -> None:
    """Of one rank, which NCCL also captures; two GPUs: ``tests/e2e/test_generate.py``."""
    assert run_ranks(_collects_within_a_graph, 1, fresh=True) == [[5.0] * 3]


def _frees_what_it_took(rank: int, world_size: int, folder: Path) -> tuple[int, int]:
    torch.cuda.set_device(0)
    world = World(rank, world_size, torch.device("cuda", 0))
    context = context_of(folder, ParallelPlan(), world)
    taken = []
    for _ in range(3):
        answers(context, SAMPLINGS["greedy"], ALL, None)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        taken.append(torch.cuda.memory_reserved())
    return taken[0], taken[-1]


@pytest.mark.gpu
@needs_cuda
def test_graphs_and_their_memory_end_with_the_generation(tmp_path: Path) -> None:
    save_model(tmp_path, *VARIANTS["llama grouped"], seed=1)
    ((first, last),) = run_ranks(_frees_what_it_took, 1, tmp_path, fresh=True)
    assert last <= first
