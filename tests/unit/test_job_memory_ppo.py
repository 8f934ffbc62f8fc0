"""Memory of the models and phases of stage ppo, against sums made by hand."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from puzzle_align.layout.job_plan import ContextPlan, OptimizerStates, Order, Settings, Workload
from puzzle_align.layout.model import ModelOptions, ModelSpec, with_scalar_head
from puzzle_align.layout.plan import ParallelPlan
from puzzle_align.planning.memory.job import (
    SAMPLING_BYTES,
    GenerationSizes,
    MemoryInputs,
    cache_token_bytes,
    estimate_memory,
    generation_bytes,
)
from puzzle_align.planning.memory.model import (
    chunk_activation_bytes,
    head_input_bytes,
    hidden_bytes,
    layer_workspace_bytes,
    rank_parameters,
    workspace_bytes,
)
from tests.specs import PAPER
from tests.unit.job_plans import ONE, TWO, context, flop_run, phase_of, plan_of

POLICY = replace(PAPER, hidden_size=64, intermediate_size=128, head_dim=16, vocab_size=256)
VALUE = with_scalar_head(POLICY)
BF16 = ModelOptions(dtype="bf16")
SIZES = GenerationSizes(
    prefill_tokens=256, decode_batch_size=8, num_sequences=32, prompt_tokens=24, response_tokens=40
)


def ppo_columns(
    places: Mapping[str, tuple[ParallelPlan, int]],
    sizes: GenerationSizes = SIZES,
    sharded: Sequence[str] = (),
    order: Order | None = None,
    sampling: ParallelPlan | None = None,
    row_tokens: int = 512,
    **beside: Any,
) -> dict[str, dict[str, int]]:
    """Columns of models on their plans, from their first ranks on.

    ``sampling``: the actor's plan while it samples, where that is another; ``beside``: more of the
    settings.
    """

    def own(role: str, workload: Workload) -> ContextPlan:
        plan, first = places[role]
        model = POLICY if role in ("actor", "reference") else VALUE
        return context(role, plan, workload, first, model, dtype="bf16")

    scoring = [own(role, "infer") for role in places if role != "actor"]
    trained = [own(role, "train") for role in ("actor", "critic") if role in places]
    learn = phase_of(*trained, name="learn", order=order)
    generate = own("actor", "generate")
    if sampling is not None:
        generate = context("actor", sampling, "generate", 0, POLICY, dtype="bf16")
    phases = [phase_of(generate, name="generate"), phase_of(*scoring, name="score"), learn]
    inputs = MemoryInputs(
        settings=Settings(
            row_tokens=row_tokens, optimizers=OptimizerStates(sharded=tuple(sharded)), **beside
        ),
        runs={"learn": flop_run(learn, row_tokens, 4)},
        generation=sizes,
    )
    return estimate_memory(plan_of(*phases, stage="ppo"), inputs)


def test_states_add_up_and_the_largest_phase_comes_on_top() -> None:
    plan = ParallelPlan(pipeline=2, data=2)
    places = dict.fromkeys(["actor", "critic", "reference"], (plan, 0))
    columns = ppo_columns(places, sharded=["actor"])
    assert list(columns) == ["0-1", "2-3"]
    for rank, parts in enumerate(columns.values()):
        value, actor = (rank_parameters(spec, plan, rank) for spec in (VALUE, POLICY))
        states = {
            "actor weights": 2 * actor,
            "actor gradients": 4 * actor,
            "actor optimizer": 12 // 2 * actor,
            "critic weights": 2 * value,
            "critic gradients": 4 * value,
            "critic optimizer": 12 * value,
            "reference weights": 2 * actor,
        }
        assert {name: parts[name] for name in states} == states
        phases = {name: parts[name] for name in ("generate", "score", "learn")}
        assert list(parts) == [*states, *phases, "total"]
        assert parts["total"] == sum(states.values()) + max(phases.values())


def test_a_phase_is_counted_where_its_models_are() -> None:
    columns = ppo_columns(
        {"actor": (ParallelPlan(data=2), 0), "critic": (ONE, 2), "reward": (ONE, 2)}
    )
    assert list(columns) == ["0-1", "2"]
    first, second = columns.values()
    for state in ("weights", "gradients", "optimizer"):
        assert first[f"critic {state}"] == second[f"actor {state}"] == 0
        assert first[f"actor {state}"] > 0 and second[f"critic {state}"] > 0
    assert first["score"] == second["generate"] == first["reward weights"] == 0
    rows = 2 * 2 * hidden_bytes(VALUE, ONE, BF16, 512)
    assert second["score"] == rows + workspace_bytes(VALUE, ONE, BF16, 0, 512, trained=False)
    assert min(first["learn"], first["generate"], second["learn"]) > 0


def test_sampling_under_a_plan_of_its_own_takes_a_copy_of_the_weights() -> None:
    places = dict.fromkeys(["actor", "critic"], (ParallelPlan(pipeline=2), 0))
    alone = ppo_columns(dict.fromkeys(["actor", "critic"], (ParallelPlan(tensor=2), 0)))
    (shared,), two = alone.values(), ppo_columns(places, sampling=ParallelPlan(tensor=2))
    weights = rank_parameters(POLICY, ParallelPlan(tensor=2), 0)
    # Norms are whole under both plans: those of two layers on either rank, and the final one.
    assert POLICY.num_hidden_layers == 4
    own = [weights - 2 * 2 * 64, weights - (2 * 2 + 1) * 64]
    assert [parts["generate"] for parts in two.values()] == [
        shared["generate"] + 2 * size for size in own
    ]


def test_a_copy_that_shares_all_its_storage_takes_none() -> None:
    replicas = ParallelPlan(data=2, tensor=2)
    tiny = GenerationSizes(
        prefill_tokens=1, decode_batch_size=1, num_sequences=1, prompt_tokens=1, response_tokens=1
    )
    places = dict.fromkeys(["actor", "critic"], (replicas, 0))
    columns = ppo_columns(places, tiny, sampling=ParallelPlan(tensor=2))
    assert list(columns) == ["0-1", "2-3"]
    first, *_, last = columns.values()
    alone = dict.fromkeys(["actor", "critic"], (ParallelPlan(tensor=2), 0))
    (own,) = ppo_columns(alone, tiny).values()
    assert first["generate"] == own["generate"] and last["generate"] == 0


def test_what_trains_may_be_elsewhere_while_responses_are_sampled() -> None:
    places = dict.fromkeys(["actor", "critic"], (ONE, 0))
    long = replace(SIZES, num_sequences=4096, decode_batch_size=4096)  # the largest phase
    (whole,) = ppo_columns(places, long).values()
    assert whole["generate"] > whole["learn"]
    actor, value = (rank_parameters(spec, ONE, 0) for spec in (POLICY, VALUE))
    for parts, size in ((("gradients",), 4), (("gradients", "optimizer"), 4 + 12)):
        (less,) = ppo_columns(places, long, set_aside=parts).values()
        assert {**less, "total": 0} == {**whole, "total": 0}
        learning = whole["total"] - whole["generate"] + whole["learn"]
        aside = size * (actor + value)
        assert less["total"] == max(whole["total"] - aside, learning)


def test_a_copy_filled_beside_the_step_is_there_when_the_activations_are_gone() -> None:
    places = dict.fromkeys(["actor", "critic"], (TWO, 0))
    sampling = ParallelPlan(tensor=2)
    apart = ppo_columns(places, sampling=sampling, row_tokens=4)
    beside = ppo_columns(places, sampling=sampling, row_tokens=4, overlap_switch=True)
    weights = rank_parameters(POLICY, sampling, 0)
    copies = [2 * (weights - 2 * 2 * 64), 2 * (weights - (2 * 2 + 1) * 64)]  # norms are shared
    for one, other, copy in zip(apart.values(), beside.values(), copies, strict=True):
        assert one["learn"] < other["learn"] == copy
        assert one["score"] == other["score"] < copy  # which trains nothing
    both = ppo_columns(places, sampling=sampling, overlap_switch=True)
    assert both == ppo_columns(places, sampling=sampling)  # activations are more


def test_ranks_that_hold_the_same_are_one_column_wherever_they_lie() -> None:
    columns = ppo_columns({"actor": (ParallelPlan(data=6), 0), "critic": (ParallelPlan(data=2), 1)})
    assert list(columns) == ["0,3-5", "1-2"]
    lone, both = columns.values()
    assert lone["critic weights"] == 0 < both["critic weights"]


def test_the_cache_holds_the_longest_sequences_of_all_slots() -> None:
    plan = ParallelPlan(pipeline=2, tensor=2)
    # Two layers a rank, one key head of 16 channels a rank, keys and values, two bytes a number.
    actor = context("actor", plan, "generate", model=POLICY, dtype="bf16")
    assert cache_token_bytes(actor, 0) == 2 * 1 * 16 * 2 * 2
    uneven = replace(actor, plan=replace(plan, pipeline_layers=(3, 1)))
    assert cache_token_bytes(uneven, 0) == 3 * 1 * 16 * 2 * 2

    def generation(sizes: GenerationSizes, rank: int = 0) -> int:
        columns = ppo_columns({"actor": (plan, 0)}, sizes)
        return [parts["generate"] for parts in columns.values()][rank]

    def batch(tokens: int, rows: int = 3) -> int:
        """A received row and both groups' sent ones, by default."""
        workspace = layer_workspace_bytes(POLICY, plan, BF16, tokens)
        return rows * hidden_bytes(POLICY, plan, BF16, tokens) + workspace

    # Two groups of eight sequences of 24 + 40 tokens; eight prompts are one batch.
    assert generation(SIZES) == 16 * 64 * 128 + batch(8 * 24)
    assert generation(replace(SIZES, num_sequences=10)) == 10 * 64 * 128 + batch(8 * 24)
    assert generation(replace(SIZES, prefill_tokens=100)) == 16 * 64 * 128 + batch(100)
    assert generation(replace(SIZES, prefill_tokens=8)) == 16 * 64 * 128 + batch(24)
    # The last rank has eight sequences' distributions beside, in the graphs' own memory.
    sampled = 8 * 256 * SAMPLING_BYTES
    assert generation(SIZES, rank=1) == 16 * 64 * 128 + batch(8 * 24, rows=2) + sampled
    # Of two chunks, the first rank receives both groups' rows ahead, and sends four; the last two.
    chunks = replace(actor, plan=replace(plan, virtual_pipeline=2))
    more = [generation_bytes(chunks, part, SIZES) - generation(SIZES, part) for part in (0, 1)]
    row = hidden_bytes(POLICY, plan, BF16, 8 * 24)
    assert more == [(2 + 4 - 3) * row, (1 + 2 - 2) * row]


def test_learning_keeps_the_larger_models_activations() -> None:
    (parts,) = ppo_columns({"actor": (ONE, 0), "critic": (ONE, 0)}).values()

    def kept(spec: ModelSpec, *, values_tokens: bool = False) -> int:
        head = head_input_bytes(spec, BF16, 512, values_tokens=values_tokens)
        return chunk_activation_bytes(spec, ONE, BF16, 0, 512) + head

    # A value a token: hidden states as they are, and in float32.
    assert kept(VALUE, values_tokens=True) - kept(VALUE) == (2 + 4) * 512 * 64
    largest = max(kept(POLICY), kept(VALUE, values_tokens=True))
    workspace = max(
        workspace_bytes(spec, ONE, BF16, 0, 512, trained=True) for spec in (POLICY, VALUE)
    )
    assert parts["learn"] == largest + workspace


@pytest.mark.parametrize("order", ["sequential", "time_shared"])
def test_learning_in_each_others_bubbles_keeps_no_more(order: Order) -> None:
    first, last = ppo_columns({"actor": (TWO, 0), "critic": (TWO, 0)}, order=order).values()
    chunk = chunk_activation_bytes(POLICY, TWO, BF16, 0, 512)  # a critic's layers are no other
    workspace = [workspace_bytes(POLICY, TWO, BF16, rank, 512, trained=True) for rank in range(2)]
    assert first["learn"] == 2 * chunk + workspace[0]
    values = head_input_bytes(VALUE, BF16, 512, values_tokens=True)
    assert last["learn"] == chunk + values + workspace[1]
