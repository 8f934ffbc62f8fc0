"""Times of sampling, against a replay of the schedule that the runtime follows."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from puzzle_align.layout.job_plan import ContextPlan
from puzzle_align.layout.plan import ParallelPlan
from puzzle_align.planning.costs.generation import _round, _transfers, generation_seconds
from puzzle_align.planning.costs.measured import Measured
from puzzle_align.planning.load import GenerationLoad
from puzzle_align.schedules.generation import GenerationSchedule
from tests.unit.job_plans import context
from tests.unit.planner_spaces import SMALL, measured_of

SIZES: dict[str, Any] = {"batches": (1, 4, 16, 64), "contexts": (64, 256, 512)}
MEASURED = measured_of(SMALL, ranks_per_node=4, **SIZES)
# A transfer takes longer than a rank's layers.
SLOW = measured_of(SMALL, ranks_per_node=1, network_bandwidth=1e8, **SIZES)
PROMPT = 64


def sampling(plan: ParallelPlan) -> ContextPlan:
    return context("actor", plan, "generate", model=SMALL, dtype="bf16")


def replay(
    own: ContextPlan, load: GenerationLoad, prefill_tokens: int, decode_batch_size: int
) -> float:
    """Seconds of one replica, batch by batch: a rank does one at a time, in the groups' order."""
    number, groups = load.num_prompts * load.num_generations, own.plan.pipeline
    schedule = GenerationSchedule(
        [int(load.prompt_tokens)] * number,
        [sequence // load.num_generations for sequence in range(number)],
        num_groups=groups,
        group_size=decode_batch_size,
        prompt_tokens=prefill_tokens,
        max_new_tokens=int(load.response_tokens),
        num_steps=1,
    )
    taken, free, back = [0] * number, [0.0] * groups, [0.0] * groups
    layers = [own.plan.num_layers_on(part, SMALL.num_hidden_layers) for part in range(groups)]
    host, working = MEASURED.host(own), True
    while working:
        working = False
        for group in range(groups):
            batch = schedule.next_batch(group)
            if batch is None:
                continue
            working, count = True, len(batch.sequences)
            if batch.is_prefill:
                prompts = len({sequence // load.num_generations for sequence in batch.sequences})
                tokens = prompts * load.prompt_tokens
                times = MEASURED.prefill(own, count, tokens)
            else:
                tokens, cached = count, sum(batch.cached) / count
                (times,) = MEASURED.decode(own, count, [cached])
            hop = _transfers(MEASURED, own, tokens, count) / groups
            at = back[group]
            for part in range(groups):
                rest = times.rest if part == groups - 1 else host
                at = free[part] = max(at, free[part]) + times.layer * layers[part] + rest
                at += hop
            back[group] = at
            for sequence in batch.sequences:
                taken[sequence] += 1
            schedule.learn(batch, [taken[s] >= load.response_tokens for s in batch.sequences])
    return max(back)


@settings(max_examples=30)
@given(
    pipeline=st.sampled_from([1, 2, 4]),
    tensor=st.sampled_from([1, 2]),
    prompts=st.sampled_from([8, 16, 24, 32, 40, 64]),  # also with a last wave that is smaller
    generations=st.sampled_from([1, 2]),
    response=st.sampled_from([32, 64, 128]),
    prefill_tokens=st.sampled_from([256, 1024]),
    decode_batch_size=st.sampled_from([4, 16, 64]),
)
def test_sampling_takes_what_its_batches_do(
    pipeline: int,
    tensor: int,
    prompts: int,
    generations: int,
    response: int,
    prefill_tokens: int,
    decode_batch_size: int,
) -> None:
    """Within a twentieth: waves are taken to be apart, and overlap where groups end in turn."""
    layers = {4: (2, 1, 1, 1), 2: (3, 2), 1: ()}[pipeline]
    own = sampling(ParallelPlan(pipeline=pipeline, tensor=tensor, pipeline_layers=layers))
    load = GenerationLoad(
        num_prompts=prompts,
        num_generations=generations,
        prompt_tokens=PROMPT,
        response_tokens=response,
        longest_prompt=PROMPT,
        longest_response=response,
    )
    sizes = {"prefill_tokens": prefill_tokens, "decode_batch_size": decode_batch_size}
    wanted = replay(own, load, prefill_tokens, decode_batch_size)
    assert generation_seconds(MEASURED, own, load, **sizes) == pytest.approx(wanted, rel=0.05)


@pytest.mark.parametrize(
    ("measured", "plan", "layers", "prompts", "generations", "prefill_tokens", "batches"),
    [
        (MEASURED, ParallelPlan(), (5,), 4, 1, 256, 1),
        (MEASURED, ParallelPlan(data=2), (5,), 7, 1, 256, 1),  # 4 of them on one replica
        (MEASURED, ParallelPlan(data=2), (5,), 3, 2, 256, 1),  # 2 of them, with two responses each
        (SLOW, ParallelPlan(pipeline=2, pipeline_layers=(3, 2)), (3, 2), 8, 1, 256, 1),
        # Batches of one prompt, which is longer than they are to be.
        (SLOW, ParallelPlan(pipeline=2, pipeline_layers=(3, 2)), (3, 2), 8, 1, 32, 4),
        # Half of the prompt's responses in each group, which reads the whole prompt.
        (SLOW, ParallelPlan(pipeline=2, pipeline_layers=(3, 2)), (3, 2), 1, 8, 256, 1),
    ],
)
def test_one_wave_of_four_responses_by_hand(
    measured: Measured,
    plan: ParallelPlan,
    layers: tuple[int, ...],
    prompts: int,
    generations: int,
    prefill_tokens: int,
    batches: int,
) -> None:
    """Four in each slot group."""
    own = sampling(plan)
    load = GenerationLoad(
        num_prompts=prompts,
        num_generations=generations,
        prompt_tokens=64,
        response_tokens=3,
        longest_prompt=64,
        longest_response=3,
    )
    count, tokens = 4 // batches, max(64, 256 // generations) // batches
    prefill, decode = measured.prefill(own, count, tokens), measured.decode(own, 4, [64, 66])
    host = measured.host(own)
    wanted = batches * _round(layers, prefill, host, _transfers(measured, own, tokens, count))
    wanted += sum(_round(layers, each, host, _transfers(measured, own, 4, 4)) for each in decode)
    sizes = {"prefill_tokens": prefill_tokens, "decode_batch_size": 4}
    assert generation_seconds(measured, own, load, **sizes) == pytest.approx(wanted)


def test_a_batch_has_one_sequence_at_least() -> None:
    """One response on two groups is half a sequence on average, but no batch has less than one."""
    measured = Measured(MEASURED.profile)
    own = sampling(ParallelPlan(pipeline=2, pipeline_layers=(3, 2)))
    sizes = {"prefill_tokens": 256, "decode_batch_size": 1}
    load = GenerationLoad(
        num_prompts=2,
        num_generations=1,
        prompt_tokens=64,
        response_tokens=3,
        longest_prompt=64,
        longest_response=3,
    )
    one, two, three = (
        generation_seconds(measured, own, replace(load, num_prompts=number), **sizes)
        for number in (1, 2, 3)
    )
    assert one == two and three == pytest.approx(2 * two)
    assert not any("a decode batch" in line for line in measured.beyond)  # one was measured


def test_a_round_is_as_long_as_the_way_round_or_as_the_slowest_ranks_work() -> None:
    own = sampling(ParallelPlan(pipeline=2, pipeline_layers=(3, 2)))
    (times,) = MEASURED.decode(own, 4, [100])
    host = MEASURED.host(own)
    first, last = 3 * times.layer + host, 2 * times.layer + times.rest
    assert _round((3, 2), times, host, 0.0) == pytest.approx(
        max(first + last, 2 * max(first, last))
    )
    assert _round((3, 2), times, host, 1.0) == pytest.approx(first + last + 1.0)


@pytest.mark.parametrize("chunks", [1, 2])
def test_a_batch_goes_from_rank_to_rank_once_a_chunk(chunks: int) -> None:
    """Then its tokens and log-probabilities, of 16 bytes a sequence, go to all ranks."""
    layers = (3, 2) if chunks == 1 else (2, 1, 1, 1)
    own = sampling(ParallelPlan(pipeline=2, virtual_pipeline=chunks, pipeline_layers=layers))
    hidden = SLOW.links.p2p(0, 1, 2 * 256 * SMALL.hidden_size, 1)
    wanted = chunks * hidden + SLOW.links.all_gather((0, 1), 16 * 4, 1)
    assert _transfers(SLOW, own, 256, 4) == pytest.approx(wanted)
