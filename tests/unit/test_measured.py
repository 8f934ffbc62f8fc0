"""Times of contexts by measured points: shards' own, and messages between ranks."""

import re
from dataclasses import replace

import pytest

from puzzle_align.layout.attention import AttentionBackend
from puzzle_align.layout.job_plan import ContextPlan, Workload
from puzzle_align.layout.model import LORA_TARGETS, LoraSpec, padded_vocab_size, with_scalar_head
from puzzle_align.layout.plan import ParallelPlan
from puzzle_align.planning.costs.declared import declared_profile
from puzzle_align.planning.costs.interpolate import Line
from puzzle_align.planning.costs.measured import Measured, RowShape
from puzzle_align.planning.costs.profile import EndPoint, RowPoint, Time
from puzzle_align.planning.memory.model import rank_parameters
from tests.refusals import refusal
from tests.unit.job_plans import context
from tests.unit.planner_spaces import SMALL, measured_of, tool

MEASURED = measured_of(SMALL, rows=(1024, 2048), recomputes=("none", "full"))
ROW = RowShape(row_tokens=1024, pairs=128.0 * 1024, predictions=1024.0)
HIDDEN = 2 * 1024 * SMALL.hidden_size  # bytes of a row's hidden states


def of(plan: ParallelPlan, recompute: str = "none", **more) -> ContextPlan:
    return context("actor", plan, model=SMALL, dtype="bf16", recompute=recompute, **more)


def point(tensor: int, recompute: str) -> RowPoint:
    (own,) = (
        p
        for p in MEASURED.profile.models[0].rows
        if (p.tensor, p.recompute, p.row_tokens, p.pairs) == (tensor, recompute, 1024, 128 * 1024)
    )
    return own


def ends_of(tensor: int) -> EndPoint:
    (own,) = (
        p
        for p in MEASURED.profile.of(SMALL).ends
        if (p.tensor, p.row_tokens, p.predictions) == (tensor, 1024, 1024)
    )
    return own


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_one_rank_takes_what_was_measured(recompute: str) -> None:
    times, own = MEASURED.row(of(ParallelPlan(), recompute), ROW, train=True), point(1, recompute)
    assert times.layer == own.train_forward.median
    assert times.layer_backward == own.backward.median
    assert times.kept_bytes == own.kept_bytes
    ends = ends_of(1)
    assert times.embedding == ends.embedding_forward.median
    assert times.embedding_backward == ends.embedding_backward.median
    assert times.head == ends.head_train_forward.median
    assert times.head_backward == ends.head_backward.median


def test_a_forward_alone_has_no_backward_and_keeps_nothing() -> None:
    frozen = context("reference", ParallelPlan(), "infer", model=SMALL, dtype="bf16")
    times, own, ends = MEASURED.row(frozen, ROW, train=False), point(1, "none"), ends_of(1)
    assert (times.layer, times.layer_backward) == (own.forward.median, 0)
    assert (times.embedding, times.embedding_backward) == (ends.embedding_forward.median, 0)
    assert (times.head, times.head_backward) == (ends.head_forward.median, 0)
    assert times.kept_bytes == 0


@pytest.mark.parametrize(("attention", "skips"), [("segments", True), ("flex", False)])
def test_padding_costs_what_attention_computes_of_it(
    attention: AttentionBackend, skips: bool
) -> None:
    padded = replace(ROW, pairs=ROW.pairs / 2, padding_pairs=ROW.pairs)
    counted = replace(ROW, pairs=(0.5 if skips else 1.5) * ROW.pairs)
    own = of(ParallelPlan())
    own = replace(own, options=replace(own.options, attention=attention))
    assert MEASURED.row(own, padded, train=True) == MEASURED.row(own, counted, train=True)


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_tensor_ranks_sum_twice_and_recompute_again(
    recompute: str, sequence_parallel: bool
) -> None:
    plan = ParallelPlan(tensor=2, sequence_parallel=sequence_parallel)
    times, own = MEASURED.row(of(plan, recompute), ROW, train=True), point(2, recompute)
    talk = MEASURED.links.all_reduce((0, 1), HIDDEN)
    if sequence_parallel:  # a reduce-scatter and an all-gather
        talk = 2 * MEASURED.links.all_gather((0, 1), HIDDEN)
    sums = 4 if recompute == "full" else 2
    assert times.layer == pytest.approx(own.train_forward.median + 2 * talk)
    assert times.layer_backward == pytest.approx(own.backward.median + sums * talk)


@pytest.mark.parametrize(
    ("recompute", "bytes_a_token"),
    [("none", 2 * 4 * SMALL.hidden_size + 8), ("full", 2 * SMALL.hidden_size)],
)
def test_under_sequence_parallelism_ranks_keep_half_of_the_replicated_activations(
    recompute: str, bytes_a_token: int
) -> None:
    """Inputs of norms and projections in bf16, and the norms' scales; or a layer's input alone."""
    plan = ParallelPlan(tensor=2, sequence_parallel=True)
    times, own = MEASURED.row(of(plan, recompute), ROW, train=True), point(2, recompute)
    assert own.kept_bytes - times.kept_bytes == 1024 * bytes_a_token / 2


def test_tensor_ranks_sum_the_gradient_of_a_vocabularys_head_and_none_of_a_scalar_head() -> None:
    scalar = with_scalar_head(SMALL)
    measured = measured_of(SMALL, scalar)
    talk = measured.links.all_reduce((0, 1), HIDDEN)
    for model, sums in ((SMALL, 1), (scalar, 0)):
        (head,) = (
            p.head_backward.median
            for p in measured.profile.of(model).ends
            if (p.tensor, p.predictions) == (2, 1024)
        )
        placed = context("actor", ParallelPlan(tensor=2), model=model, dtype="bf16")
        times = measured.row(placed, ROW, train=True)
        assert times.head_backward == pytest.approx(head + sums * talk)


def test_tensor_ranks_sum_embeddings_and_join_the_parts_of_the_vocabulary() -> None:
    """Each rank has a log-sum-exp a prediction to gather, and the sum of targets' logits."""
    times = MEASURED.row(of(ParallelPlan(tensor=2)), ROW, train=True)
    ends, links, pair = ends_of(2), MEASURED.links, (0, 1)
    talk = links.all_reduce(pair, HIDDEN)
    assert times.embedding == pytest.approx(ends.embedding_forward.median + talk)
    joined = links.all_gather(pair, 2 * 4 * 1024) + links.all_reduce(pair, 4 * 1024)
    assert times.head == pytest.approx(ends.head_train_forward.median + joined)


@pytest.mark.parametrize("ranks", [(0, 1), (0, 1, 3, 4)])  # the last two on one node, and on two
def test_tensor_ranks_gather_the_logits_that_they_sample_from(ranks: tuple[int, ...]) -> None:
    plan, slowest = ParallelPlan(data=len(ranks) // 2, tensor=2), ranks[-2:]
    sampling = context("actor", plan, "generate", model=SMALL, ranks=ranks, dtype="bf16")
    own = next(p for p in MEASURED.decode_points(SMALL) if p.tensor == 2 and p.sequences > 1)
    (times,) = MEASURED.decode(sampling, own.sequences, [own.context])
    talk = MEASURED.links.all_reduce(slowest, 2 * own.sequences * SMALL.hidden_size)
    logits = MEASURED.links.all_gather(slowest, 4 * own.sequences * padded_vocab_size(SMALL))
    assert times.layer == pytest.approx(own.layer.median + 2 * talk)
    assert times.rest == pytest.approx(own.rest.median + talk + logits)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_tensor_ranks_talk_as_slowly_as_the_slowest_of_their_groups(
    sequence_parallel: bool,
) -> None:
    """The second group of ranks 0, 1, 3, 4, two a node, is on two nodes."""
    plan = ParallelPlan(data=2, tensor=2, sequence_parallel=sequence_parallel)
    own, links = of(plan, ranks=(0, 1, 3, 4)), MEASURED.links
    quick, talk = (
        2 * links.all_gather(pair, HIDDEN) if sequence_parallel else links.all_reduce(pair, HIDDEN)
        for pair in ((0, 1), (3, 4))
    )
    assert talk > quick
    wanted = point(2, "none").train_forward.median + 2 * talk
    assert MEASURED.row(own, ROW, train=True).layer == pytest.approx(wanted)


def test_ends_are_on_the_first_and_the_last_position() -> None:
    plan = ParallelPlan(pipeline=2, pipeline_layers=(3, 2))
    costs = MEASURED.action_costs(of(plan), ROW)
    times = MEASURED.row(of(plan), ROW, train=True)
    assert costs.forward == (3 * times.layer + times.embedding, 2 * times.layer + times.head)
    first, last = (number * times.layer_backward for number in (3, 2))
    assert costs.backward == (first + times.embedding_backward, last + times.head_backward)
    assert costs.activation == (3 * times.kept_bytes + HIDDEN, 2 * times.kept_bytes + HIDDEN)


@pytest.mark.parametrize("workload", ["train", "infer"])
def test_layers_are_balanced_by_all_that_they_and_the_head_take(workload: Workload) -> None:
    """The head takes as long as three of nine layers: ranks have six, or three and the head."""
    own = MEASURED.profile.models[0]
    one, two, three, eight = (Time(median=seconds) for seconds in (1.0, 2.0, 3.0, 8.0))
    rows = [replace(p, forward=one, train_forward=one, backward=two) for p in own.rows]
    ends = [
        replace(p, head_forward=three, head_train_forward=one, head_backward=eight)
        for p in own.ends
    ]
    model = replace(own, rows=tuple(rows), ends=tuple(ends))
    measured = Measured(replace(MEASURED.profile, models=(model,)))
    nine = replace(SMALL, num_hidden_layers=9)
    placed = context("actor", ParallelPlan(pipeline=2), workload, model=nine, dtype="bf16")
    assert measured.balanced_layers(placed, ROW) == (6, 3)


def test_replicas_sum_gradients_and_sharded_ones_gather_weights() -> None:
    own = of(ParallelPlan(data=2))
    held = rank_parameters(SMALL, own.plan, 0)
    links = MEASURED.links
    assert MEASURED.reduce_gradients(own, sharded=False) == links.all_reduce((0, 1), 4 * held)
    both = links.all_gather((0, 1), 4 * held) + links.all_gather((0, 1), 2 * held)
    assert MEASURED.reduce_gradients(own, sharded=True) == both


@pytest.mark.parametrize(("sharded", "share"), [(False, 1), (True, 2)])
def test_a_sharded_step_updates_a_replica_s_share(sharded: bool, share: int) -> None:
    """On the pipeline rank with the most parameters."""
    own = of(ParallelPlan(pipeline=2, data=2, pipeline_layers=(3, 2)))
    held = max(rank_parameters(SMALL, own.plan, part) for part in range(2))
    steps = Line((p.parameters, p.step.median) for p in MEASURED.profile.of(SMALL).optimizer)
    sums = 2 * MEASURED.links.all_reduce(range(4), 4096, 1)  # the norm, and whether it is finite
    wanted = steps.at(held / share).value + sums
    assert MEASURED.optimizer_step(own, sharded=sharded) == pytest.approx(wanted)


@pytest.mark.parametrize("is_frozen", [False, True])
def test_ends_of_a_pipeline_sum_a_tied_embedding_s_gradient_unless_it_is_frozen(
    is_frozen: bool,
) -> None:
    tied = replace(SMALL, tie_word_embeddings=True)
    if is_frozen:
        tied = replace(tied, lora=LoraSpec(r=2, lora_alpha=2.0, target_modules=("q_proj",)))
    plan = ParallelPlan(pipeline=2, pipeline_layers=(3, 2))
    own = context("actor", plan, model=tied, dtype="bf16")
    table = 4 * padded_vocab_size(tied) * tied.hidden_size
    talk = 0.0 if is_frozen else MEASURED.links.all_reduce((0, 1), table)
    assert MEASURED.reduce_gradients(own, sharded=False) == talk


def test_of_replicas_in_several_places_the_slowest_count() -> None:
    """Two ranks a node: of ranks 1 to 4 under D2, P2, replicas of one part are on two nodes."""
    own = of(ParallelPlan(pipeline=2, data=2), first=1)
    held = [rank_parameters(SMALL, replace(own.plan, pipeline_layers=(3, 2)), p) for p in (0, 1)]
    uneven = replace(own, plan=replace(own.plan, pipeline_layers=(3, 2)))
    assert MEASURED.links.place((1, 2)) == MEASURED.links.place((3, 4)) == "network"
    wanted = MEASURED.links.all_reduce((1, 2), 4 * max(held))
    assert MEASURED.reduce_gradients(uneven, sharded=False) == wanted
    # Two tensor ranks' replicas: 0 and 1 on one node, 2 and 4 on two.
    torn = of(ParallelPlan(data=2, tensor=2), ranks=(0, 2, 1, 4))
    wanted = MEASURED.links.all_reduce((2, 4), 4 * rank_parameters(SMALL, torn.plan, 0))
    assert MEASURED.reduce_gradients(torn, sharded=False) == wanted


def test_prompts_of_equally_many_tokens_take_what_as_many_of_them_took() -> None:
    sampling = context("actor", ParallelPlan(), "generate", model=SMALL, dtype="bf16")
    own = MEASURED.profile.models[0]
    first = replace(own.prefill[0], tensor=1, tokens=1024)
    points = [
        replace(first, sequences=number, layer=Time(median=layer), rest=Time(median=rest))
        for number, layer, rest in ((2, 5.0, 1.0), (8, 2.0, 4.0))
    ]
    measured = Measured(replace(MEASURED.profile, models=(replace(own, prefill=tuple(points)),)))
    for sequences, layer, rest in ((2, 5.0, 1.0), (4, 4.0, 2.0), (8, 2.0, 4.0)):
        times = measured.prefill(sampling, sequences, 1024)
        assert (times.layer, times.rest) == pytest.approx((layer, rest))


def test_a_host_takes_what_the_smallest_batch_did_beside_its_layers() -> None:
    sampling = context("actor", ParallelPlan(), "generate", model=SMALL, dtype="bf16")
    points = MEASURED.decode_points(SMALL)
    (alone,) = {p.rest.median for p in points if p.tensor == 1 and p.sequences == 1}
    assert alone < max(p.rest.median for p in points if p.tensor == 1)
    halved = [p.rest.median for p in points if p.tensor == 2 and p.sequences == 1]
    assert MEASURED.host(sampling) == min(alone, *halved)


def test_a_model_whose_generation_was_not_measured_is_one_line() -> None:
    alone = Measured(
        replace(MEASURED.profile, models=(replace(MEASURED.profile.models[0], decode=()),))
    )
    sampling = context("actor", ParallelPlan(), "generate", model=SMALL, dtype="bf16")
    line = refusal(lambda: alone.host(sampling))
    assert line.startswith("the profile has no generation of a llama ")
    assert line.endswith("profile this job")


def test_declared_times_by_hand() -> None:
    """Of two tensor ranks at 200 TFLOP/s and 1.6 TB/s, with launches of 60 us a layer."""
    matrices = 1024 * (2 * 16 + 2 * 4) * 64 + 3 * 1024 * 2816
    table, launch, bytes_each = 2 * 1024 * 32000 / 2, 60e-6, 2 / 1.6e12
    forward = 1024 * (2 * matrices + 4 * 16 * 64 * 128) / 2 / 200e12 + launch
    for recompute, passes in (("none", 3), ("full", 4)):  # of which one is the forward's
        own = point(2, recompute)
        assert own.train_forward.median == pytest.approx(forward)
        assert own.backward.median == pytest.approx((passes - 1) * forward)
    assert point(2, "full").kept_bytes == HIDDEN < point(2, "none").kept_bytes
    ends = ends_of(2)
    assert ends.head_forward.median == pytest.approx(1024 * table / 200e12 + launch)
    assert ends.embedding_forward.median == pytest.approx(2 * HIDDEN / 1.6e12 + launch)
    profile = MEASURED.profile.of(SMALL)
    decode = next(p for p in profile.decode if (p.tensor, p.sequences, p.context) == (2, 8, 512))
    cached = 2 * 4 * 64 * 512 * 8  # keys and values of eight sequences
    weights = (matrices + 2 * 1024 + cached) / 2 * bytes_each
    assert decode.layer.median == pytest.approx(weights + launch)
    rest = (table / 2 + 14 * 32000 * 8) * bytes_each
    assert decode.rest.median == pytest.approx(rest + 5 * launch)
    device = tool("planner_cases").A100
    declared = declared_profile([SMALL], device, [], optimizers={SMALL: [("bf16", True)]})
    small, large = (p.step.median for p in declared.models[0].optimizer)
    assert large - small == pytest.approx((10**9 - 10**6) * (20 / 1.6e12 + 2 * 6 / 50e9))
    copies = [p.time.median for p in declared.links[0].points if p.size == 2**30]
    assert copies == [2 * 2**30 / 1.6e12]


@pytest.mark.parametrize("share", [0.125, 0.3, 0.86, 1.0])
def test_a_declared_head_takes_as_long_as_its_predictions(share: float) -> None:
    measured, number = Measured(MEASURED.profile), share * 1024
    times = measured.row(of(ParallelPlan()), replace(ROW, predictions=number), train=True)
    assert times.head == pytest.approx(number * 2 * 1024 * 32000 / 200e12 + 60e-6)
    assert not measured.beyond


def test_a_declared_selective_recompute_computes_attention_again() -> None:
    kept, again = (
        measured_of(SMALL, recomputes=(each,)).profile.models[0].rows
        for each in ("none", "selective")
    )
    for one, other in zip(kept, again, strict=True):
        attention = 4 * 16 * 64 * one.pairs / one.tensor / 200e12
        assert other.backward.median - one.backward.median == pytest.approx(attention)


def test_declared_backwards_of_frozen_matrices_are_as_long_as_their_forwards() -> None:
    adapted = replace(SMALL, lora=LoraSpec(r=2, lora_alpha=2.0, target_modules=LORA_TARGETS))
    whole, frozen = (measured_of(model).profile.models[0] for model in (SMALL, adapted))
    for point in whole.rows:
        assert point.backward.median == 2 * point.forward.median
    near, far = frozen.rows[:2]  # two numbers of pairs: what they add is attention
    attention = far.forward.median - near.forward.median
    assert far.backward.median - near.backward.median == pytest.approx(2 * attention)
    assert near.forward.median < near.backward.median < 2 * near.forward.median
    assert frozen.ends[0].head_backward.median == 2 * frozen.ends[0].head_forward.median
    assert frozen.ends[0].embedding_backward.median == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"plan": ParallelPlan(tensor=4)}, r"no rows at tensor size 4 of a llama .*--tensor 4"),
        ({"recompute": "selective"}, r"no rows at tensor size 1 with recompute=selective"),
        ({"model": replace(SMALL, hidden_size=512)}, r"the profile has no llama of hidden.* 512,"),
    ],
)
def test_what_was_not_measured_is_one_line(change: dict, message: str) -> None:
    plan, model = change.get("plan", ParallelPlan()), change.get("model", SMALL)
    own = context(
        "actor", plan, model=model, dtype="bf16", recompute=change.get("recompute", "none")
    )
    assert re.search(message, refusal(lambda: MEASURED.row(own, ROW, train=True)))


def test_a_missing_link_and_a_missing_optimizer_step_are_one_line() -> None:
    bare = Measured(replace(MEASURED.profile, links=()))
    with pytest.raises(ValueError, match="no all_reduce within a node"):
        bare.row(of(ParallelPlan(tensor=2)), ROW, train=True)
    models = tuple(replace(own, optimizer=()) for own in MEASURED.profile.models)
    with pytest.raises(ValueError, match="no optimizer step"):
        Measured(replace(MEASURED.profile, models=models)).optimizer_step(
            of(ParallelPlan()), sharded=False
        )
    with pytest.raises(ValueError, match="a scalar head"):
        MEASURED.profile.of(with_scalar_head(SMALL))


def test_what_lies_beyond_is_named() -> None:
    own = Measured(MEASURED.profile)
    own.row(of(ParallelPlan()), replace(ROW, row_tokens=8192, pairs=128.0 * 8192), train=False)
    assert any("8192 tokens" in line for line in own.beyond)
    assert not Measured(MEASURED.profile).beyond


def test_a_transfer_is_as_slow_as_in_the_slowest_pipeline() -> None:
    """Of six pipelines two stay on their node from the first rank to the second."""
    measured = measured_of(SMALL, ranks_per_node=8)
    own = context("actor", ParallelPlan(pipeline=4, data=3, tensor=2), model=SMALL)
    pairs = [(rank, rank + 6) for rank in range(6)]
    inside, across = (
        measured.links.p2p(*pair, 2**20, measured.links.at_once(pair, pairs))
        for pair in (pairs[0], pairs[2])
    )
    assert measured.hidden_transfer(own, 0, 1, 2**20) == across > 10 * inside
