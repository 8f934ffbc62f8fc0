"""Generation under several plans against transformers' and a plain float64 sampler, token by token.

The parent process saves tiny random models with transformers and generates with them; the ranks
load the same weights under every plan of their number and answer the same prompts.
"""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from puzzle_align.algos.sampling import uniform_numbers
from puzzle_align.layout.model import ModelOptions
from puzzle_align.layout.plan import ParallelPlan
from puzzle_align.models.hf.sources import SafetensorsSource
from puzzle_align.models.hf.weights import load_weights
from puzzle_align.runtime.context import Context, build_context
from puzzle_align.runtime.generation import engine
from puzzle_align.runtime.generation.engine import generate
from puzzle_align.runtime.generation.sampling import Request, Response, Sampling
from puzzle_align.runtime.groups.world import World, build_communicators
from puzzle_align.runtime.liveness.failure import CannotGoOn
from puzzle_align.schedules.generation import GenerationBatch
from tests.bounds import LOGIT_BOUND, probability_bound
from tests.dist import chunk_runs
from tests.dist.chunk_runs import SIZES, VARIANTS, save_model, saved_spec
from tests.dist.spawn import run_ranks

FAMILIES = {
    **chunk_runs.FAMILIES,
    "llama": VARIANTS["llama grouped"],
    "mistral": ("Mistral", {"sliding_window": None, "head_dim": 32}),
}
PLANS = {
    "(1,1,1)": ParallelPlan(),
    "(2,1,1)": ParallelPlan(pipeline=2),
    "(1,1,2)": ParallelPlan(tensor=2),
    "(1,1,2) sequence parallel": ParallelPlan(tensor=2, sequence_parallel=True),
    "(2,1,1) interleaved": ParallelPlan(pipeline=2, virtual_pipeline=2),
    "(2,1,1) uneven": ParallelPlan(pipeline=2, pipeline_layers=(3, 1)),
    "(2,1,2)": ParallelPlan(pipeline=2, tensor=2),
    "(2,1,2) both": ParallelPlan(pipeline=2, virtual_pipeline=2, tensor=2, sequence_parallel=True),
    "(4,1,1)": ParallelPlan(pipeline=4),
    "(2,2,1)": ParallelPlan(pipeline=2, data=2),
}
WHOLE, STOPPED, SAMPLED, CUT = range(4)  # what is expected of a model, in order
FAMILY_CASES = [(family, WHOLE) for family in FAMILIES]
LLAMA_CASES = [("llama", STOPPED), ("llama", SAMPLED), ("llama", CUT)]
CASES = {
    1: {"(1,1,1)": FAMILY_CASES + LLAMA_CASES},
    2: {
        "(2,1,1)": [*FAMILY_CASES, ("llama", CUT)],
        "(1,1,2)": [*FAMILY_CASES, ("llama", CUT)],
        "(1,1,2) sequence parallel": [("llama", SAMPLED), ("qwen3", STOPPED)],
        "(2,1,1) interleaved": [("llama", SAMPLED), ("qwen3", STOPPED)],
        "(2,1,1) uneven": [("llama", SAMPLED), ("qwen2", WHOLE)],
    },
    4: {
        "(2,1,2)": [*FAMILY_CASES, ("llama", CUT)],
        "(2,1,2) both": [("llama", SAMPLED)],
        "(4,1,1)": [("llama", CUT)],
        "(2,2,1)": [("llama", SAMPLED)],
    },
}
SIZES_OF = {WHOLE: (32, 8), STOPPED: (64, 3), SAMPLED: (1, 3), CUT: (40, 2)}  # see generate
LENGTHS = (3, 17, 17, 1, 9, 30, 5)
NEW_TOKENS = 15
NUM_STOPS = 6
GREEDY = Sampling(
    temperature=0.0,
    top_k=0,
    top_p=1.0,
    min_new_tokens=0,
    max_new_tokens=NEW_TOKENS,
    stop_token_ids=(),
    seed=0,
)


@dataclass(frozen=True)
class Expected:
    """Tokens and log-probabilities of every request of one sampling."""

    sampling: Sampling
    tokens: list[list[int]]
    log_probs: list[list[float]]


def _prompts() -> list[np.ndarray]:
    """Ragged; the second and the third are one."""
    generator = np.random.default_rng(5)
    prompts = [generator.integers(0, SIZES["vocab_size"], length) for length in LENGTHS]
    prompts[2] = prompts[1].copy()
    return prompts


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders of models, each with what is expected of it."""
    folder = tmp_path_factory.mktemp("models")
    for name, (family, changes) in FAMILIES.items():
        model = save_model(folder / name, family, changes, seed=1)
        expected = _greedy_by_transformers(model)
        if name == "llama":
            expected += _sampled_by_numpy(model)
        torch.save(expected, folder / name / "expected.pt")
    return folder


def _greedy_by_transformers(model: Any) -> list[Expected]:
    """Without stop tokens, and with some that end part of the responses."""
    plain = _generate_by_transformers(model, GREEDY)
    early = [tokens[4 + 2 * number] for number, tokens in enumerate(plain.tokens[:NUM_STOPS])]
    stopping = Sampling(**{**vars(GREEDY), "stop_token_ids": tuple(dict.fromkeys(early))})
    stopped = _generate_by_transformers(model, stopping)
    assert len({len(tokens) for tokens in stopped.tokens}) > 3
    return [plain, stopped]


def _generate_by_transformers(model: Any, sampling: Sampling) -> Expected:
    prompts, longest = _prompts(), max(LENGTHS)
    padded = np.stack([np.pad(prompt, (longest - len(prompt), 0)) for prompt in prompts])
    places = np.arange(longest) >= longest - np.array(LENGTHS)[:, None]
    made = model.generate(
        torch.from_numpy(padded),
        attention_mask=torch.from_numpy(places.astype(np.int64)),
        max_new_tokens=sampling.max_new_tokens,
        do_sample=False,
        eos_token_id=list(sampling.stop_token_ids) or None,
        pad_token_id=0,
    )[:, longest:]
    tokens, log_probs = [], []
    for prompt, answer in zip(prompts, made, strict=True):
        ends = np.flatnonzero(np.isin(answer, sampling.stop_token_ids))
        answer = answer[: ends[0] + 1] if len(ends) else answer  # padding stands behind
        whole = torch.cat([torch.from_numpy(prompt), answer])
        with torch.no_grad():
            logits = model(whole[None]).logits[0, len(prompt) - 1 : -1]
        first, second = logits.topk(2).values.T
        assert (first - second).min() > 3 * LOGIT_BOUND, "margins that rounding could turn"
        tokens.append(answer.tolist())
        log_probs.append(logits.log_softmax(-1).gather(1, answer[:, None])[:, 0].tolist())
    return Expected(sampling, tokens, log_probs)


def _sampled_by_numpy(model: Any) -> list[Expected]:
    """Token by token from whole forwards, by the definitions of top-k and top-p."""
    cases = [
        Sampling(0.9, 0, 1.0, 5, 20, tuple(range(0, 300, 10)), seed=7),
        Sampling(1.3, 25, 0.8, 2, 20, tuple(range(0, 300, 8)), seed=8),
    ]
    found = []
    for sampling in cases:
        tokens, log_probs = [], []
        for number, prompt in enumerate(_prompts()):
            answer, probabilities = _answer_by_numpy(model, prompt, _id(number), sampling)
            tokens.append(answer)
            log_probs.append(probabilities)
        assert len({len(answer) for answer in tokens}) > 2
        found.append(Expected(sampling, tokens, log_probs))
    return found


def _answer_by_numpy(
    model: Any, prompt: np.ndarray, request: int, sampling: Sampling
) -> tuple[list[int], list[float]]:
    answer: list[int] = []
    log_probs: list[float] = []
    while len(answer) < sampling.max_new_tokens:
        whole = torch.from_numpy(np.concatenate([prompt, answer]).astype(np.int64))
        with torch.no_grad():
            logits = model(whole[None]).logits[0, -1].double().numpy() / sampling.temperature
        number = uniform_numbers(sampling.seed, np.array([request]), np.array([len(answer)]))[0]
        token = _draw_by_numpy(logits, number, len(answer), sampling)
        answer.append(token)
        log_probs.append(logits[token] - np.log(np.exp(logits).sum()))
        if token in sampling.stop_token_ids:
            break
    return answer, log_probs


def _draw_by_numpy(logits: np.ndarray, number: float, place: int, sampling: Sampling) -> int:
    """Asserts that no cut and no draw is so near that logits within their bound would turn it."""
    bound = LOGIT_BOUND / sampling.temperature
    weights = np.exp(logits)
    if place < sampling.min_new_tokens:
        weights[list(sampling.stop_token_ids)] = 0.0
    order = np.argsort(-weights, kind="stable")
    if sampling.top_k:
        last, next_one = np.log(weights[order[sampling.top_k - 1 : sampling.top_k + 1]])
        assert last - next_one > 2 * bound
        weights[order[sampling.top_k :]] = 0.0
    total, kept = weights.sum(), 0.0
    for rank, token in enumerate(order):
        if sampling.top_p < 1.0:
            assert abs(kept / total - sampling.top_p) > probability_bound(bound)
        if rank and kept >= sampling.top_p * total:
            weights[token] = 0.0
        kept += weights[token]
    reached, goal = 0.0, number * weights.sum()
    for token in np.flatnonzero(weights):
        before, reached = reached, reached + weights[token]
        if reached > goal:
            nearest = min(goal - before, reached - goal) / weights.sum()
            assert nearest > probability_bound(bound)
            return int(token)
    raise AssertionError("no token was drawn")


def _id(number: int) -> int:
    return 100 + 3 * number


def context_of(
    folder: Path, plan: ParallelPlan, world: World, options: ModelOptions | None = None
) -> Context:
    """The model under ``plan``; one that needs one rank, on every rank by itself."""
    spec = saved_spec(folder)
    ranks = range(world.size) if plan.world_size > 1 else [world.rank]
    return build_context(
        "actor",
        spec,
        options or ModelOptions(),
        plan,
        world,
        communicators=build_communicators(plan, world, ranks, trained=False),
        fill=lambda chunk: load_weights(chunk, spec, SafetensorsSource(folder)),
    )


def _cases(
    world_size: int, families: Collection[str], labels: Collection[str]
) -> dict[str, list[tuple[str, int]]]:
    cases = CASES[world_size]
    return {label: [case for case in cases[label] if case[0] in families] for label in labels}


def _answers_on_ranks(
    rank: int, world_size: int, folder: Path, families: Collection[str], labels: Collection[str]
) -> dict[str, float]:
    """Errors of the log-probabilities by plan and case; the tokens are asserted here."""
    world = World(rank, world_size, torch.device("cpu"))
    worst = {}
    for label, cases in _cases(world_size, families, labels).items():
        built: dict[str, Context] = {}
        for family, place in cases:
            if family not in built:
                built[family] = context_of(folder / family, PLANS[label], world)
            expected = torch.load(folder / family / "expected.pt", weights_only=False)[place]
            key = f"{label} {family} {place}"
            worst[key] = _check(built[family], expected, SIZES_OF[place], key)
        for context in built.values():
            _check_state(context)
    return worst


def _check_state(context: Context) -> None:
    """Generation leaves nothing behind; a model that has diverged is found out, on every rank."""
    assert all(chunk.training and chunk.row_state.current is None for chunk in context.chunks)
    assert all(chunk.decoder.input_tensor is None for chunk in context.chunks)
    with torch.no_grad():
        for parameter in context.chunks[-1].decoder.parameters():
            parameter.fill_(torch.nan)
    requests = [Request(0, _prompts()[0])]
    with pytest.raises(CannotGoOn, match="not finite") as raised:
        generate(context, requests, GREEDY, prefill_tokens=8, decode_batch_size=1)
    assert any("batch 0: prompts of 1 sequences" in note for note in raised.value.__notes__)


@contextmanager
def noted_batches() -> Iterator[list[GenerationBatch]]:
    """Batches of the generations within, noted when the host fetches what they made."""
    collect, batches = engine._Generation._collect, list[GenerationBatch]()

    def noting(self: Any, batch: GenerationBatch) -> None:
        batches.append(batch)
        collect(self, batch)

    engine._Generation._collect = noting
    try:
        yield batches
    finally:
        engine._Generation._collect = collect


def _check(context: Context, case: Expected, sizes: tuple[int, int], key: str) -> float:
    """Answers of this replica's share of the requests, which are those with its remainder."""
    replica, replicas = context.data_rank, context.plan.data
    numbers = list(range(replica, len(LENGTHS), replicas))
    prompts = _prompts()
    requests = [Request(_id(number), prompts[number]) for number in numbers]
    prefill_tokens, decode_batch_size = sizes
    with noted_batches() as batches:
        responses = generate(
            context,
            requests,
            case.sampling,
            prefill_tokens=prefill_tokens,
            decode_batch_size=decode_batch_size,
        )
    for batch in batches:
        if batch.is_prefill:  # a prompt is computed once, and a longer one alone
            distinct = {tuple(requests[number].prompt.tolist()) for number in batch.sequences}
            assert len(distinct) == 1 or sum(map(len, distinct)) <= prefill_tokens, key
        else:
            assert len(batch.sequences) <= decode_batch_size, key
    errors = [_error(case, n, r, key) for n, r in zip(numbers, responses, strict=True)]
    return float(np.max(errors))  # NaN, if one is


def _error(case: Expected, number: int, response: Response, key: str) -> float:
    assert response.id == _id(number), key
    assert response.tokens.tolist() == case.tokens[number], f"{key}, request {number}"
    assert response.stopped == (case.tokens[number][-1] in case.sampling.stop_token_ids), key
    assert response.tokens.dtype == np.int64 and response.log_probs.dtype == np.float32
    return float(np.abs(response.log_probs - np.array(case.log_probs[number])).max())


# Others have each part of them, tests/dist/test_hf_parity.py families on tensor ranks (Mistral's
# layers are Llama's).
MORE = [
    (2, (*FAMILIES,), (*CASES[2],)),
    (4, (*FAMILIES,), (*CASES[4],)),
]


@pytest.mark.parametrize(
    ("world_size", "families", "labels"),
    [
        (1, (*FAMILIES,), (*CASES[1],)),
        (2, ("llama", "gemma"), ("(2,1,1)", "(1,1,2)")),
        (2, ("llama",), ("(2,1,1) interleaved", "(2,1,1) uneven", "(1,1,2) sequence parallel")),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in MORE),
    ],
    ids=["1", "2", "2, other cuts", "2, all", "4, all"],
)
def test_answers_are_those_of_transformers_and_numpy(
    world_size: int, families: Collection[str], labels: Collection[str], references: Path
) -> None:
    cases = _cases(world_size, families, labels)
    for worst in run_ranks(_answers_on_ranks, world_size, references, families, labels):
        assert len(worst) == sum(map(len, cases.values()))
        assert all(error <= LOGIT_BOUND for error in worst.values()), worst
