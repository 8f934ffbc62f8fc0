"""Searches against looking at every plan there is, on spaces small enough for it."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from puzzle_align.layout.job_plan import ContextPlan, OptimizerStates, Phase
from puzzle_align.layout.model import LoraSpec, without_adapters
from puzzle_align.layout.plan import ParallelPlan
from puzzle_align.planning.costs.switch import switch_seconds
from puzzle_align.planning.iteration import PhaseTime, Times, predict_iteration
from puzzle_align.planning.report import idle_of
from puzzle_align.planning.search.evaluation import Evaluation, Planned, sampled_at_once
from puzzle_align.planning.search.searches import SearchResult, exhaustive, similarity
from puzzle_align.planning.search.space import Choice, SamplingChoice
from tests.unit.planner_spaces import measured_of, small_case, tool

KEEP = 3


@dataclass(frozen=True)
class Looked:
    """A plan that was looked at."""

    text: str
    seconds: float
    peak_bytes: int


SHARDED = OptimizerStates(sharded=("actor", "critic"))
ADAPTERS = LoraSpec(r=64, lora_alpha=64, target_modules=("q_proj", "down_proj"))
# What the spaces differ by: stage, ranks, and more of ``small_case``.
SPACES: tuple[tuple[str, int, dict[str, Any]], ...] = (
    ("ppo", 1, {}),
    ("ppo", 2, {"layers": (6, 4), "optimizers": SHARDED}),
    ("ppo", 2, {"layers": (4, 4), "ranks_per_node": 1, "overlap_switch": True}),
    ("ppo", 4, {"layers": (4, 2), "examples": 8, "network_bandwidth": 1e9}),
    ("ppo", 2, {"layers": (4, 2), "lora": ADAPTERS, "merged": ("actor",)}),
    ("ppo", 3, {"layers": (3, 6), "set_aside": ("gradients", "optimizer"), "mini_batches": 2}),
    ("dpo", 2, {"layers": (5, 5)}),
    ("dpo", 4, {"layers": (4, 4), "examples": 12}),
    ("reward", 4, {"layers": (6, 6)}),
)


@cache
def every_plan(number: int) -> list[Looked]:
    """All plans of a space, evaluated one by one, whatever they need."""
    stage, ranks, more = SPACES[number]
    space = small_case(stage, ranks, **more).space()
    evaluation = Evaluation(space)
    found = []
    for choice in space.choices():
        for sampling in _samplings(space, choice):
            planned = evaluation.planned(choice, sampling)
            found.append(Looked(planned.text, planned.seconds, planned.peak_bytes))
    return found


def _samplings(space: Any, choice: Choice) -> list[SamplingChoice | None]:
    if not space.job.samples:
        return [None]
    numbers = {len(choice.context("actor").ranks), space.cluster.num_ranks}
    return [candidate for number in numbers for candidate in space.samplings(number)]


def fastest_by_text(plans: Iterable[Looked]) -> list[float]:
    """Seconds of the fastest plan of each text, in order."""
    by_text: dict[str, float] = {}
    for candidate in plans:
        by_text[candidate.text] = min(
            candidate.seconds, by_text.get(candidate.text, candidate.seconds)
        )
    return sorted(by_text.values())


def searched(search: Any, number: int, memory_bytes: int) -> SearchResult:
    stage, ranks, more = SPACES[number]
    space = small_case(stage, ranks, memory_bytes=memory_bytes, **more).space()
    return search(space, KEEP)


@pytest.mark.parametrize("number", range(len(SPACES)))
@settings(max_examples=8)
@given(share=st.floats(0, 1))
def test_the_fastest_that_fit_are_found_whatever_the_memory(number: int, share: float) -> None:
    """``share`` of all plans fit."""
    every = every_plan(number)
    peaks = sorted(candidate.peak_bytes for candidate in every)
    memory = peaks[min(int(share * len(peaks)), len(peaks) - 1)]
    found = searched(exhaustive, number, memory)
    wanted = fastest_by_text(candidate for candidate in every if candidate.peak_bytes <= memory)
    assert [candidate.seconds for candidate in found.best] == pytest.approx(wanted[:KEEP])
    assert all(candidate.peak_bytes <= memory for candidate in found.best)
    assert found.nearest is None
    assert found.num_evaluated <= len(every)
    near = searched(similarity, number, memory)
    assert len({candidate.text for candidate in found.best}) == len(found.best)
    assert near.best and all(candidate.peak_bytes <= memory for candidate in near.best)
    assert near.best[0].seconds >= found.best[0].seconds * (1 - 1e-9)


@pytest.mark.parametrize("number", range(len(SPACES)))
def test_similarity_has_as_many_plans_as_it_is_asked_for(number: int) -> None:
    best = searched(similarity, number, 2**50).best
    assert len(best) == len({candidate.text for candidate in best}) == KEEP
    assert best == sorted(best, key=lambda candidate: candidate.rank)


def test_of_equally_fast_plans_the_one_with_the_least_work_is_first() -> None:
    """A reference on ranks of its own ends before the policy, whatever its plan."""
    space = small_case("dpo", 4, layers=(4, 4)).space()
    evaluation = Evaluation(space)
    planned = [evaluation.planned(choice, None) for choice in space.choices()]
    by_seconds: dict[float, list[Planned]] = {}
    for each in sorted(planned, key=lambda candidate: candidate.rank):
        if each.plan.phase("train").order == "concurrent":
            by_seconds.setdefault(each.seconds, []).append(each)
    ties = [tied for tied in by_seconds.values() if len({each.rank for each in tied}) > 1]
    assert ties
    for tied in ties:
        busy = [sum(phase.busy for phase in each.phases.values()) for each in tied]
        assert busy == sorted(busy) and busy[0] < busy[-1]
        assert all(work <= 4 * tied[0].seconds * (1 + 1e-9) for work in busy)


def test_an_actor_samples_without_its_adapters_where_they_are_merged() -> None:
    """In its own plan, after they are merged; elsewhere with them, after a switch."""
    case = small_case("ppo", 2, layers=(4, 2), lora=ADAPTERS)
    own = next(c for c in case.space().choices() if c.context("actor").plan.data == 2)
    trained = own.context("actor")
    sampling = replace(trained, workload="generate")
    other = replace(sampling, plan=ParallelPlan(tensor=2))
    base = replace(sampling, model=without_adapters(trained.model))
    apart, merged = (
        Times(case.measured, case.load, replace(case.job.settings, merged=roles))
        for roles in ((), ("actor",))
    )
    beside = apart.generate_phases(trained, sampling, 1024, 8)
    within = merged.generate_phases(trained, sampling, 1024, 8)
    assert beside == {"generate": PhaseTime(seconds=apart.sampled(sampling, 1024, 8))}
    assert within["generate"].seconds == apart.sampled(base, 1024, 8) < beside["generate"].seconds
    # By hand, from the declared device's bytes/s: q with k and v, of 1024 x 1536, and down.
    adapted = 4 * 1024 * (1536 + 2816)
    assert within["switch"].seconds == pytest.approx(36 * adapted / 1.6e12)
    elsewhere = (trained, other, 1024, 8)
    assert merged.generate_phases(*elsewhere) == apart.generate_phases(*elsewhere)


def test_a_switch_may_overlap_the_optimizer_s_step() -> None:
    """From two parts to two replicas: longer than the step between nodes, shorter within one."""
    for ranks_per_node, is_longer in ((1, True), (2, False)):
        case = small_case("ppo", 2, layers=(4, 4), ranks_per_node=ranks_per_node)
        choices = (choice.context("actor") for choice in case.space().choices())
        trained = next(c for c in choices if c.plan == ParallelPlan(pipeline=2))
        sampling = replace(trained, workload="generate", plan=ParallelPlan(data=2))
        links, step = case.measured.links, case.measured.optimizer_step(trained, sharded=False)
        moved = switch_seconds(links, trained, sampling) + links.all_reduce((0, 1), 4)
        assert (moved > step) == is_longer
        for overlaps, wanted in ((False, moved), (True, moved - step if is_longer else 0.0)):
            own = replace(case.job.settings, overlap_switch=overlaps)
            times = Times(case.measured, case.load, own)
            phases = times.generate_phases(trained, sampling, 1024, 8)
            assert phases.get("switch", PhaseTime(seconds=0.0)).seconds == pytest.approx(wanted)


@pytest.mark.parametrize(("name", "batches", "passes"), [("score", 1, 1), ("learn", 2, 2 * 3)])
def test_the_time_of_a_phase_by_hand(name: str, batches: int, passes: int) -> None:
    """Two replicas of all models, of which the actor's optimizer is sharded; three epochs."""
    states = OptimizerStates(sharded=("actor",))
    case = small_case("ppo", 2, examples=32, mini_batches=2, optimizers=states)
    measured, load = case.measured, replace(case.load, epochs=3)
    choice = next(c for c in case.space().choices() if c.context("actor").plan.data == 2)
    phase = next(phase for phase in choice.phases if phase.name == name)
    rows = load.rows(1024, batches, phase.contexts[0].plan)
    row_seconds, beside = measured.prepare(phase.contexts[0], rows.row), 0.0  # one for all models
    for context in phase.contexts:
        costs = measured.action_costs(context, rows.row)
        row_seconds += sum((*costs.forward, *costs.backward))
        if context in phase.trained:
            sharded = context.role == "actor"
            beside += measured.reduce_gradients(context, sharded=sharded)
            beside += measured.optimizer_step(context, sharded=sharded)
    seconds = passes * (rows.microbatches * row_seconds + beside)
    found = Times(measured, load, case.job.settings).phase(phase, 1024)
    assert found.seconds == pytest.approx(seconds)
    assert (found.idle, found.busy) == pytest.approx((0.0, 2 * seconds))


def test_a_batch_is_trained_on_once_an_epoch() -> None:
    case = small_case("ppo", 1, mini_batches=2)
    phase = next(p for p in next(case.space().choices()).phases if p.trained)
    seconds = [
        Times(case.measured, replace(case.load, epochs=epochs), case.job.settings)
        .phase(phase, 1024)
        .seconds
        for epochs in (1, 3)
    ]
    assert seconds[1] == pytest.approx(3 * seconds[0])


def test_greedy_responses_are_sampled_and_scored_beside_the_others() -> None:
    """Of 16 prompts with four responses each, as many again as if each prompt had one."""
    case = small_case("ppo", 2)
    choice = next(c for c in case.space().choices() if c.context("actor").plan.data == 2)
    scoring = next(phase for phase in choice.phases if phase.name == "score")
    sampling = replace(choice.context("actor"), workload="generate")

    def seconds(**generation: Any) -> tuple[float, float]:
        sampled = replace(case.load.generation, **generation)
        times = Times(case.measured, replace(case.load, generation=sampled), case.job.settings)
        return times.sampled(sampling, 1024, 64), times.phase(scoring, 1024).seconds

    four, scored = seconds(num_generations=4)
    one, _ = seconds(num_generations=1)
    both, scored_both = seconds(num_generations=4, greedy=True)
    assert both == pytest.approx(four + one)
    assert scored_both == pytest.approx(1.25 * scored)


def test_decode_batches_are_powers_of_two_up_to_a_pipeline_ranks_share() -> None:
    """A replica samples 12 / D of 12 prompts; each of its P slot groups has a P-th of these."""
    space = small_case("ppo", 4, layers=(4, 2), examples=12).space()
    sizes: dict[tuple[int, int, int], set[int]] = {}
    for each in space.samplings(4):
        plan = each.plan
        key = plan.pipeline, plan.data, plan.tensor
        sizes.setdefault(key, set()).add(each.decode_batch_size)
    assert sizes == {
        (1, 4, 1): {1, 2, 3},
        (2, 2, 1): {1, 2, 3},
        (4, 1, 1): {1, 2, 3},
        (1, 2, 2): {1, 2, 4, 6},
        (2, 1, 2): {1, 2, 4, 6},
    }
    assert {each.prefill_tokens for each in space.samplings(4)} == {1024, 4096}


def test_memory_is_that_of_the_replica_with_the_most_prompts() -> None:
    space = small_case("ppo", 4, layers=(4, 2), examples=13).space()
    sizes = {each.plan.data: sampled_at_once(space, each.plan, each) for each in space.samplings(4)}
    assert {data: size.num_sequences for data, size in sizes.items()} == {1: 13, 2: 7, 4: 4}
    # A prefill has prompts alone; a cache slot has the response too.
    assert {(size.prompt_tokens, size.response_tokens) for size in sizes.values()} == {(128, 64)}


def test_a_plan_has_the_sizes_of_its_choice_and_sampling() -> None:
    case = small_case("ppo", 1)
    sizes: dict[str, Any] = {"rows": (1024, 2048), "recomputes": ("none", "full")}
    space = replace(case, measured=measured_of(*case.job.models.values(), **sizes)).space()
    evaluation, found = Evaluation(space), set()
    for choice in space.choices():
        trained = choice.context("actor")
        for sampling in space.samplings(1):
            planned = evaluation.planned(choice, sampling)
            settings, sizes_of = planned.settings, (choice.row_tokens, sampling.prefill_tokens)
            assert (settings.row_tokens, settings.prefill_tokens) == sizes_of
            assert settings.decode_batch_size == sampling.decode_batch_size
            assert planned.plan.context("actor", "generate").options == trained.options
            assert planned.memory["0"]["CUDA"] > 0
            again = predict_iteration(planned.plan, space.measured, space.load, settings)
            assert again.phases == planned.phases and again.seconds == planned.seconds
            found.add((*sizes_of, trained.options.recompute))
    assert len(found) == 2 * 3 * 2


def test_phases_that_are_never_idle_count_in_the_idle_share() -> None:
    space = small_case("ppo", 1).space()
    planned = Evaluation(space).planned(next(space.choices()), space.samplings(1)[0])
    times = {
        "generate": PhaseTime(seconds=9.0),  # of which idle ranks are not known
        "score": PhaseTime(seconds=1.0, idle=0.0, busy=1.0),
        "learn": PhaseTime(seconds=1.0, idle=0.5, busy=0.5),
    }
    assert idle_of(replace(planned, phases=times)) == 0.25


def test_ranks_that_wait_for_others_are_idle() -> None:
    """The critic's rank waits while the actor's larger model learns beside it."""
    space = small_case("ppo", 2, layers=(6, 2)).space()
    learn = next(
        phase
        for choice in space.choices()
        for phase in choice.phases
        if phase.name == "learn" and len(phase.colocated) == 2
    )
    actor, critic = (
        space.times.phase(replace(learn, contexts=group, order="sequential"), 1024).seconds
        for group in learn.colocated
    )
    assert critic < 0.6 * actor
    both = space.times.phase(learn, 1024)
    assert both.seconds == actor and both.idle == pytest.approx((1 - critic / actor) / 2)


@pytest.mark.parametrize("search", [exhaustive, similarity])
@pytest.mark.parametrize("number", range(len(SPACES)))
def test_where_nothing_fits_the_plan_that_needs_least_is_reported(search: Any, number: int) -> None:
    least = min(candidate.peak_bytes for candidate in every_plan(number))
    found = searched(search, number, least - 1)
    assert not found.best and found.num_evaluated == 0
    assert found.nearest is not None and found.nearest.peak_bytes == least
    phases = {phase.name for phase in found.nearest.plan.phases}
    assert phases <= found.nearest.phases.keys()  # a whole plan, sampling included


def test_without_any_plan_there_is_no_nearest() -> None:
    """Three layers at seven positions, and one example, which seven replicas cannot share."""
    space = small_case("reward", 7, layers=(3, 3), examples=1).space()
    assert list(space.choices()) == []
    assert exhaustive(space) == similarity(space) == SearchResult()


@pytest.mark.parametrize("case", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in (5, 9))])
def test_similarity_is_near_the_best_on_larger_clusters(case: int) -> None:
    """The family's own figures are ``tools/bench_planner.py``'s."""
    drawn = tool("planner_cases").draw_case(0, case)
    drawn = replace(drawn, cluster=replace(drawn.cluster, num_ranks=8))
    near, best = (search(drawn.space(), 1).best[0].seconds for search in (similarity, exhaustive))
    assert near <= 1.05 * best


def test_a_plan_fits_with_the_longest_examples() -> None:
    """Usual steps have fewer rows, or shorter ones; time counts those, memory the longest."""
    case = small_case("dpo", 4, layers=(4, 4), examples=16)
    usual = case.load.rows(1024, 1, ParallelPlan(pipeline=4))
    fewer = replace(usual, microbatches=1.0, row=replace(usual.row, row_tokens=512))
    short = replace(case, load=replace(case.load, rows=lambda *_: fewer))
    choices = [next(c for c in each.space().choices() if _is_deep(c)) for each in (case, short)]
    (peak, seconds), (short_peak, short_seconds) = (
        (max(p["total"] for p in memory.values()), evaluation.trained(choice))
        for each, choice in zip((case, short), choices, strict=True)
        for evaluation in [Evaluation(each.space())]
        for memory in [evaluation.memory(choice, None)]
    )
    assert short_seconds < seconds and short_peak == peak


def test_memory_counts_the_most_rows_of_a_replica() -> None:
    """Of 16 pairs, four in a row; a step has as many rows as usual if those are more."""
    case = small_case("dpo", 4, layers=(4, 4), examples=16)
    nine = replace(case.load.rows(1024, 1, ParallelPlan()), microbatches=9.0)
    many = replace(case, load=replace(case.load, rows=lambda *_: nine))
    for each, wanted in ((case, {1: 4, 2: 2, 4: 1}), (many, {1: 9, 2: 9, 4: 9})):
        space = each.space()
        plain = [c for c in space.choices() if c.context("actor").plan.virtual_pipeline == 1]
        for choice in (choice for choice in plain if choice.mode == "colocated"):
            run = space.times.fullest(choice.phases[0], 1024)
            assert run.num_microbatches["actor"](0) == wanted[choice.context("actor").plan.data]


def _is_deep(choice: Choice) -> bool:
    return choice.context("actor").plan.pipeline == 4 and choice.mode == "colocated"


def test_where_layers_do_not_divide_the_actor_samples_in_place() -> None:
    """It is trained with balanced layers, and samples with the same ones: nothing moves."""
    space = small_case("ppo", 4, layers=(6, 6)).space()
    evaluation = Evaluation(space)
    grid = ParallelPlan(pipeline=4)
    sampling = next(each for each in space.samplings(4) if each.plan.grid == grid)
    found = [
        evaluation.planned(choice, sampling)
        for choice in space.choices()
        if choice.context("actor").plan.grid == grid and len(choice.context("actor").ranks) == 4
    ]
    assert found and all("switch" not in each.phases for each in found)
    layers = {each.plan.context("actor", "train").plan.pipeline_layers for each in found}
    assert layers - {sampling.plan.pipeline_layers}  # balanced by time, with the head


Grid = tuple[int, int, int, int]  # P, D, T, V


def _grid(context: ContextPlan) -> Grid:
    plan = context.plan
    assert plan.sequence_parallel == (plan.tensor > 1)
    return plan.pipeline, plan.data, plan.tensor, plan.virtual_pipeline


def test_the_choices_on_two_nodes_of_two_ranks_by_hand() -> None:
    """Of four layers and two examples; only the first model's chunks are tried on its own grid."""
    found = set()
    for choice in small_case("dpo", 4, layers=(4, 4), examples=2).space().choices():
        actor, reference = (choice.context(role) for role in ("actor", "reference"))
        assert actor.ranks == tuple(range(len(actor.ranks)))
        assert reference.ranks == tuple(range(len(actor.ranks) % 4, 4))
        names = ["precompute", "train"] if choice.mode == "before" else ["train"]
        assert [phase.name for phase in choice.phases] == names
        found.add((choice.mode, _grid(actor), _grid(reference)))
    plain = {(2, 2, 1, 1), (4, 1, 1, 1), (1, 2, 2, 1), (2, 1, 2, 1)}
    whole = plain | {(2, 2, 1, 2), (2, 1, 2, 2)}
    halves = {(1, 1, 2, 1), (1, 2, 1, 1), (2, 1, 1, 1)}
    one, three = (1, 1, 1, 1), (3, 1, 1, 1)
    assert found == {
        *((mode, grid, grid) for mode in ("colocated", "before") for grid in whole),
        *(("another grid", grid, other) for grid in whole for other in plain - {grid}),
        *(("apart", grid, other) for grid in halves for other in halves),
        ("apart", one, three),
        ("apart", three, one),
    }


def test_tensor_ranks_are_of_one_node() -> None:
    space = small_case("dpo", 4, layers=(4, 4), ranks_per_node=1).space()
    assert {choice.context("actor").plan.tensor for choice in space.choices()} == {1}


def test_the_choices_of_four_models_by_hand() -> None:
    """On three ranks, which two replicas cannot share, the actor's or the critic's two models."""
    case = small_case("ppo", 3, layers=(4, 4), examples=2)
    space = replace(case, job=replace(case.job, bases={"reference": "actor"})).space()
    found = set()
    for choice in space.choices():
        sides = [
            {(_grid(context), context.ranks) for context in map(choice.context, roles)}
            for roles in (("actor", "reference"), ("critic", "reward"))
        ]
        ((first, ranks),), ((second, others),) = sides
        assert choice.context("reference").base == "actor"
        assert choice.context("reward").base is None
        found.add((first, ranks, second, others))
    halves = ((1, 1, 2, 1), (1, 2, 1, 1), (2, 1, 1, 1))
    one, three, whole = (1, 1, 1, 1), (3, 1, 1, 1), (0, 1, 2)
    assert found == {
        (three, whole, three, whole),
        *((one, (0,), half, (1, 2)) for half in halves),
        *((half, (0, 1), one, (2,)) for half in halves),
    }


def test_models_apart_may_have_whole_nodes() -> None:
    space = small_case("ppo", 24, layers=(4, 4), ranks_per_node=8).space()
    assert space._splits(24) == [3, 6, 8, 9, 12, 15, 16, 18, 21]
    assert {8, 16} < {group.num_ranks for group in space.groups()}


@pytest.mark.parametrize(
    ("number", "splits"),
    [(6, [1, 2, 3, 4, 5]), (14, [*range(1, 14)]), (23, [*range(2, 23, 2)])],
)
def test_models_apart_do_not_take_a_node_that_is_not_there(number: int, splits: list[int]) -> None:
    space = small_case("ppo", number, layers=(4, 4), ranks_per_node=8).space()
    assert space._splits(number) == splits  # not 8, 16, 24, the nearest to the last ones
    assert [choice for group in space.groups() for choice in group.choices()]


def test_few_of_the_choices_are_made_and_bounded() -> None:
    """On 64 ranks, where the actor alone decides which grids are worth a look."""
    case = small_case("dpo", 64, layers=(8, 8), examples=64, ranks_per_node=8)
    number = sum(1 for _ in case.space().choices())
    for search in (similarity, exhaustive):
        found = search(case.space(), KEEP)
        assert len(found.best) == KEEP and found.num_bounded <= 0.25 * number


@pytest.mark.parametrize("number", range(len(SPACES)))
def test_no_choice_is_faster_than_its_group(number: int) -> None:
    stage, ranks, more = SPACES[number]
    space = small_case(stage, ranks, **more).space()
    for group in space.groups():
        for choice in group.choices():
            least = space.times.least_seconds(choice.phases, choice.row_tokens)
            assert group.seconds <= least * (1 + 1e-9)
            assert group.num_ranks == len(choice.context(space.job.trained[0]).ranks)


@pytest.mark.parametrize(
    ("mode", "roles"), [("before", ["actor"]), ("colocated", ["actor", "reference"])]
)
def test_work_beside_the_iterations_counts_with_its_share(mode: str, roles: list[str]) -> None:
    """The reference's pass before training is over all data, and serves all evaluations."""
    case = small_case("dpo", 2)
    choice = next(choice for choice in case.space().choices() if choice.mode == mode)
    load = replace(case.load, num_iterations=200, data_batches=210.0)
    load = replace(load, held_out_batches=8.5, num_evaluations=5)
    times = Times(case.measured, load, case.job.settings)

    def batch(context: ContextPlan) -> float:
        forward = replace(context, workload="infer")
        phase = Phase(name="forward", order="sequential", contexts=(forward,))
        return times.phase(phase, 1024).seconds

    seconds = {name: time.seconds for name, time in times.phases(choice.phases, 1024).items()}
    evaluated = sum(batch(choice.context(role)) for role in roles)
    assert seconds["evaluate"] == pytest.approx(evaluated * 8.5 * 5 / 200)
    if mode == "before":
        reference = batch(choice.context("reference"))
        assert seconds["precompute"] == pytest.approx(reference * 210 / 200)
    assert times.least_seconds(choice.phases, 1024) <= sum(seconds.values()) * (1 + 1e-9)
