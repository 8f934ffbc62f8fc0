"""Rows of sampled responses: how many share a prompt, what rows hold, and whose they are."""

from itertools import chain
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from puzzle_align.config.job import JobConfig
from puzzle_align.config.sections.data import PackingConfig
from puzzle_align.data.dataset import ExampleDataset
from puzzle_align.data.loader import plan_view
from puzzle_align.data.prompts import PromptDataset
from puzzle_align.layout.plan import ParallelPlan
from puzzle_align.runtime.columns import Responses
from puzzle_align.stages.rl.rollout import (
    Rollout,
    dataset_of,
    loader_of,
    responses_together,
    sample_sources,
    samples_of_rank,
)
from tests.unit.job_plans import context
from tests.unit.test_loader import make_dataset, slots_of


def together(prompts: list[int], responses: list[list[int]], row: int, layout: str) -> int:
    packing = PackingConfig(row_tokens=row, layout=layout)
    return responses_together(np.array(prompts), np.array(responses), packing)


def test_by_hand() -> None:
    """A prompt of 10 with four responses of 5: 30 tokens with all, 20 with two, 15 with one."""
    same = [[5, 5, 5, 5]]
    assert [together([10], same, row, "shared") for row in (30, 29, 20, 19, 15)] == [4, 2, 2, 1, 1]
    assert [together([10], same, row, "paired") for row in (60, 59, 30, 29)] == [4, 2, 2, 1]
    # The longest group decides, for all prompts alike; three of six are a divisor, four are none.
    assert together([10, 1], [[1] * 6, [9, 9, 9, 1, 1, 1]], 28, "shared") == 3


@given(
    st.integers(1, 8),
    st.lists(st.integers(1, 20), min_size=1, max_size=5),
    st.integers(40, 200),
    st.sampled_from(["shared", "paired"]),
    st.randoms(use_true_random=False),
)
def test_every_group_fits_and_no_larger_ones_do(k, prompts, row, layout, random) -> None:
    responses = [[random.randint(1, 20) for _ in range(k)] for _ in prompts]

    def fit(number: int) -> bool:
        return all(
            (prompt if layout == "shared" else number * prompt) + sum(own[first : first + number])
            <= row
            for prompt, own in zip(prompts, responses, strict=True)
            for first in range(0, k, number)
        )

    found = together(prompts, responses, row, layout)
    assert k % found == 0 and fit(found)
    assert not any(fit(number) for number in range(found + 1, k + 1) if k % number == 0)


def rollout_of(prompts: list[int], prompt_lengths: list[int], lengths: list[int]) -> Rollout:
    """Responses of these lengths, equally many to each prompt."""
    return Rollout(
        iteration=5,
        batch=5,
        prompts=np.array(prompts),
        prompt_lengths=np.array(prompt_lengths),
        stopped=np.ones(len(lengths), dtype=bool),
        responses=Responses(np.array(lengths), np.zeros(len(lengths), dtype=np.int64)),
        num_generations=len(lengths) // len(prompts),
    )


def test_a_data_set_has_the_tokens_of_its_rank_and_the_lengths_of_all() -> None:
    """Two of a prompt's six responses fit into a row; the rank has responses 9, 2 and 8."""
    none = np.zeros(0, dtype=np.int64)
    prompts = PromptDataset(
        tokens=np.arange(10, 19, dtype=np.int32),
        prompt_starts=np.array([0, 2, 6]),
        prompt_lengths=np.array([2, 4, 3], dtype=np.int32),
        lines=none,
        line_starts=none,
        line_lengths=none,
        column_names=(),
        pad_id=99,
        fingerprint="prompts",
    )
    rollout = rollout_of([2, 0], [3, 2], [3, 1, 2, 4, 1, 2, 2, 2, 1, 3, 2, 1])
    assert rollout.prompt_of(5) == 2 and rollout.prompt_of(6) == 0
    tokens = {9: np.array([90, 91, 92]), 2: np.array([20, 21]), 8: np.array([80])}
    data = dataset_of(rollout, prompts, tokens, PackingConfig(row_tokens=9))
    assert data.prompt_lengths.tolist() == [3, 3, 3, 2, 2, 2]
    assert data.response_lengths.tolist() == [[3, 1], [2, 4], [1, 2], [2, 2], [1, 3], [2, 1]]
    found = [data.prompt(example).tolist() for example in range(6)]
    assert found == [[16, 17, 18]] * 3 + [[10, 11]] * 3
    assert data.response(1, 0).tolist() == [20, 21]
    assert [data.response(4, branch).tolist() for branch in (0, 1)] == [[80], [90, 91, 92]]
    assert (data.pad_id, data.fingerprint) == (99, "iteration 5")
    assert data.tokens.dtype == data.prompt_lengths.dtype == data.response_lengths.dtype == np.int32
    one = dataset_of(rollout, prompts, {8: tokens[8]}, PackingConfig(row_tokens=9))
    assert one.tokens.tolist() == [10, 11, 80] and one.prompt(4).tolist() == [10, 11]
    lengths_only = dataset_of(rollout, prompts, {}, PackingConfig(row_tokens=16))
    assert len(lengths_only.tokens) == 0
    assert lengths_only.response_lengths.tolist() == [[3, 1, 2, 4, 1, 2], [2, 2, 1, 3, 2, 1]]


def split(data: ExampleDataset, together: int) -> ExampleDataset:
    """The examples, each repeated with this many of its responses at a time."""
    times = data.num_responses // together
    return ExampleDataset(
        tokens=data.tokens,
        prompt_starts=data.prompt_starts.repeat(times),
        prompt_lengths=data.prompt_lengths.repeat(times),
        response_starts=data.response_starts.reshape(-1, together),
        response_lengths=data.response_lengths.reshape(-1, together),
        pad_id=data.pad_id,
        fingerprint=data.fingerprint,
    )


@pytest.mark.parametrize("together", [4, 2, 1])
def test_each_epoch_draws_a_batch_s_prompts_with_all_their_responses(together: int) -> None:
    """Twelve prompts of four responses in two batches: the split does not change the draw."""
    config = JobConfig(packing=PackingConfig(row_tokens=48), seed=3)
    data, times = make_dataset(12, num_responses=4), 4 // together
    whole, parts = loader_of(config, data, 4, batches=1), loader_of(config, data, 4, batches=2)
    of_split = loader_of(config, split(data, together), 4, batches=2)
    assert whole.data_ranks(0)[0].tolist() == whole.data_ranks(1)[0].tolist() == [*range(12)]
    drawn = []
    for step in range(4):
        prompts, examples = parts.data_ranks(step)[0], of_split.data_ranks(step)[0]
        assert len(prompts) == 6
        assert examples.tolist() == (prompts[:, None] * times + np.arange(times)).ravel().tolist()
        drawn.append({*prompts.tolist()})
    assert set.union(*drawn[:2]) == set.union(*drawn[2:]) == {*range(12)}
    assert drawn[:2] != drawn[2:]
    other = loader_of(JobConfig(packing=config.packing, seed=4), data, 4, batches=2)
    assert {*other.data_ranks(0)[0].tolist()} != drawn[0]


@pytest.mark.parametrize("batches", [1, 3])
def test_a_response_s_ranks_are_those_whose_rows_hold_it(batches: int) -> None:
    """The output rank of a replica of two stages sends what the replica's rows hold."""
    config = JobConfig(packing=PackingConfig(row_tokens=48), seed=3)
    data, plan = make_dataset(12, num_responses=4), ParallelPlan(pipeline=2, data=2, tensor=2)
    loader, planned = loader_of(config, data, 4, batches=batches), context("critic", plan, first=4)
    replicas: list[Any] = [SimpleNamespace(plan=plan, data_rank=rank) for rank in range(2)]
    held: list[list[list[int]]] = []  # by replica and step
    for replica in replicas:
        view = loader.seen_by(plan_view(plan, replica.data_rank))
        steps = [slots_of(data, view.batch(step)) for step in range(batches)]
        held.append([sorted(example * 4 + branch for example, branch in step) for step in steps])
        assert all(held[-1])
        for step, samples in enumerate(held[-1]):
            assert samples_of_rank(loader, [step], [replica]) == samples
        assert samples_of_rank(loader, range(batches), [replica]) == sorted(chain(*held[-1]))
    assert samples_of_rank(loader, [0], replicas) == sorted(held[0][0] + held[1][0])
    assert samples_of_rank(loader, [0], []) == samples_of_rank(loader, [], replicas) == []
    if batches == 1:
        sources = sample_sources(loader, planned)
        ranks = [planned.topology.rank(1, data_rank, 0) for data_rank in range(2)]
        assert sources.dtype == np.int64
        assert [np.flatnonzero(sources == r).tolist() for r in ranks] == [held[0][0], held[1][0]]
