"""The loader's invariants, what microbatches hold, and what the planner takes them to hold."""

from collections.abc import Sequence
from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from puzzle_align.data import loader as loading
from puzzle_align.data.dataset import ExampleDataset, TokenizedExample, from_examples, split
from puzzle_align.data.loader import Batch, DataView, ExampleLoader, collate_row, plan_view
from puzzle_align.layout.plan import ParallelPlan
from puzzle_align.layout.rows import RowLayout, membership
from puzzle_align.stages.outlook import rows_of
from tests.refusals import refusal

PAD = 0


def make_dataset(
    num_examples: int, num_responses: int = 2, seed: int = 0, longest: int = 8
) -> ExampleDataset:
    """Pairs whose tokens tell where they come from: every token of the set is distinct."""
    generator = np.random.default_rng(seed)
    pairs, token = [], 1
    for _ in range(num_examples):
        parts = []
        for length in generator.integers(1, longest + 1, 1 + num_responses).tolist():
            parts.append(list(range(token, token + length)))
            token += length
        pairs.append((parts[0], parts[1:]))
    return from_examples(pairs, PAD)


def make_loader(dataset: ExampleDataset, **changes) -> ExampleLoader:
    settings = {"global_batch_size": 8, "row_tokens": 64, "layout": "shared", "packed": True}
    settings = {**settings, "scope": "batch", "seed": 1, "shuffle": True}
    names = {field.name for field in fields(DataView)} & changes.keys()
    view = DataView(**{name: changes.pop(name) for name in names})
    return ExampleLoader(dataset, **{**settings, **changes}, view=view)


def fill(batches: list[Batch]) -> float:
    """Share of the row tokens that is not padding."""
    return sum(b.num_tokens for b in batches) / sum(b.num_row_tokens for b in batches)


def slots_of(dataset: ExampleDataset, batch: Batch) -> dict[tuple[int, int], tuple[list[int], ...]]:
    """(dataset row, branch) -> (prompt, response) tokens, read back from the microbatches."""
    found = {}
    for microbatch in batch.microbatches:
        slot = 0
        for segment in microbatch.layout.segments:
            prompt = microbatch.tokens[segment.start : segment.prompt_end].tolist()
            for start, end in segment.response_spans():
                row = int(batch.example_indices[microbatch.example_ids[slot]])
                key = (row, int(microbatch.branch_ids[slot]))
                assert key not in found
                found[key] = (prompt, microbatch.tokens[start:end].tolist())
                slot += 1
        assert slot == len(microbatch.example_ids) == len(microbatch.branch_ids)
    return found


def contents(dataset: ExampleDataset, rows: np.ndarray) -> dict:
    return {
        (row, branch): (dataset.prompt(row).tolist(), dataset.response(row, branch).tolist())
        for row in rows.tolist()
        for branch in range(dataset.num_responses)
    }


loader_cases = st.fixed_dictionaries(
    {
        "num_examples": st.integers(1, 40),
        "num_responses": st.integers(1, 3),
        "global_batch_size": st.integers(1, 12),
        "layout": st.sampled_from(["shared", "paired"]),
        "packed": st.booleans(),
        "scope": st.sampled_from(["batch", "dataset"]),
        "data_size": st.integers(1, 4),
        "microbatch_multiple": st.integers(1, 3),
        "sequence_multiple": st.sampled_from([1, 2, 4]),
        "shuffle": st.booleans(),
    }
)


@given(loader_cases)
@settings(max_examples=150)
def test_every_example_once_an_epoch_with_equal_counts_within_the_budget(case):
    dataset = make_dataset(case.pop("num_examples"), case.pop("num_responses"))
    row_tokens = 96
    loaders = [
        make_loader(dataset, row_tokens=row_tokens, data_rank=rank, **case)
        for rank in range(case["data_size"])
    ]
    single = make_loader(dataset, row_tokens=row_tokens, **{**case, "data_size": 1})
    steps = loaders[0].steps_per_epoch
    assert single.steps_per_epoch == steps
    seen: list[int] = []
    for step in range(steps, 2 * steps):  # the second epoch, without the first
        batches = [loader.batch(step) for loader in loaders]
        alone = single.batch(step)
        counts = {len(batch.microbatches) for batch in batches}
        assert len(counts) == 1 and counts.pop() % case["microbatch_multiple"] == 0
        widths = {m.layout.num_tokens for batch in batches for m in batch.microbatches}
        assert len(widths) == 1
        width = widths.pop()
        assert width == row_tokens if case["packed"] else width <= row_tokens
        assert width % case["sequence_multiple"] == 0
        found = {}
        for batch in batches:
            assert np.array_equal(batch.example_indices, alone.example_indices)
            assert (batch.num_examples, batch.num_tokens) == (alone.num_examples, alone.num_tokens)
            found |= slots_of(dataset, batch)
        assert found == contents(dataset, alone.example_indices)
        rows = [m.layout for batch in batches for m in batch.microbatches]
        assert sum(s.end - s.start for row in rows for s in row.segments) == alone.num_tokens
        assert sum(row.num_tokens for row in rows) == batches[0].num_row_tokens
        seen += alone.example_indices.tolist()
    assert sorted(seen) == list(range(len(dataset)))


def test_a_step_of_scope_batch_holds_global_batch_size_pairs():
    loader = make_loader(make_dataset(43))
    counts = [loader.batch(step).num_examples for step in range(loader.steps_per_epoch)]
    assert counts == [8, 8, 8, 8, 8, 3]


def test_a_step_of_scope_dataset_holds_about_global_batch_size_pairs_at_higher_fill():
    dataset = make_dataset(1000)
    loader = make_loader(dataset, scope="dataset", global_batch_size=32)
    batches = [loader.batch(step) for step in range(loader.steps_per_epoch)]
    assert np.mean([batch.num_examples for batch in batches[:-1]]) == pytest.approx(32, rel=0.1)
    assert fill(batches) > 0.98
    by_batch = make_loader(dataset, global_batch_size=32)
    assert fill(batches) > fill([by_batch.batch(step) for step in range(8)])


@pytest.mark.parametrize("scope", ["batch", "dataset"])
def test_resuming_and_epochs(scope):
    dataset = make_dataset(30)
    loader, fresh = make_loader(dataset, scope=scope), make_loader(dataset, scope=scope)
    steps = loader.steps_per_epoch
    for step in range(2 * steps):
        loader.batch(step)
    last, resumed = loader.batch(2 * steps + 1), fresh.batch(2 * steps + 1)
    for one, other in zip(last.microbatches, resumed.microbatches, strict=True):
        assert one.layout == other.layout
        assert np.array_equal(one.tokens, other.tokens)
    assert not np.array_equal(fresh.batch(0).example_indices, fresh.batch(steps).example_indices)
    other_seed = make_loader(dataset, scope=scope, seed=2)
    assert not np.array_equal(fresh.batch(0).example_indices, other_seed.batch(0).example_indices)


def test_without_shuffle_the_order_is_the_files():
    loader = make_loader(make_dataset(20), shuffle=False)
    assert loader.batch(1).example_indices.tolist() == list(range(8, 16))
    assert loader.batch(loader.steps_per_epoch).example_indices.tolist() == list(range(8))


def test_shared_microbatch_by_hand():
    dataset = from_examples([([5, 6], [[7], [8, 9]]), ([1], [[2, 3], [4]])], PAD)
    microbatch = collate_row(
        dataset, np.array([1, 0]), np.array([1, 0]), layout="shared", num_tokens=11
    )
    assert microbatch.tokens.tolist() == [5, 6, 7, 8, 9, 1, 2, 3, 4, PAD, PAD]
    assert microbatch.position_ids.tolist() == [0, 1, 2, 2, 3, 0, 1, 2, 1, 0, 1]
    assert microbatch.predict_from.tolist() == [1, 1, 3, 5, 6, 5]
    assert microbatch.targets.tolist() == [7, 8, 9, 2, 3, 4]
    assert microbatch.slots.tolist() == [0, 1, 1, 2, 2, 3]
    assert microbatch.example_ids.tolist() == [1, 1, 0, 0]
    assert microbatch.branch_ids.tolist() == [0, 1, 0, 1]


def test_paired_padded_microbatch_by_hand():
    dataset = from_examples([([5, 6], [[7], [8, 9]])], PAD)
    loader = make_loader(dataset, layout="paired", packed=False, shuffle=False)
    batch = loader.batch(0)
    (microbatch,) = batch.microbatches
    # One slot of 8 a sequence: right padding, as the usual collation of preference pairs.
    assert microbatch.tokens.tolist() == [5, 6, 7, *[PAD] * 5, 5, 6, 8, 9, *[PAD] * 4]
    assert microbatch.predict_from.tolist() == [1, 9, 10]
    assert microbatch.targets.tolist() == [7, 8, 9]
    assert microbatch.example_ids.tolist() == [0, 0] and microbatch.branch_ids.tolist() == [0, 1]
    segment, _ = membership(microbatch.layout)
    assert segment.tolist() == [0] * 3 + [2] * 5 + [1] * 4 + [3] * 4
    assert fill([batch]) == 7 / 16


@pytest.mark.parametrize("layout", ["shared", "paired"])
def test_nothing_predicts_the_first_tokens_after_an_empty_prompt(layout: str) -> None:
    """Held-out losses divide by the data set's counts, training by those of the rows."""
    dataset = from_examples([([], [[1, 2, 3], [4]]), ([5], [[6, 7], [8]]), ([], [[9, 9], []])], PAD)
    counts = dataset.num_predicted(np.arange(3))
    assert counts.tolist() == [[2, 0], [2, 1], [1, 0]]
    (microbatch,) = make_loader(dataset, layout=layout, shuffle=False).batch(0).microbatches
    in_row = np.zeros_like(counts)
    examples, branches = microbatch.example_ids, microbatch.branch_ids
    np.add.at(in_row, (examples[microbatch.slots], branches[microbatch.slots]), 1)
    np.testing.assert_array_equal(in_row, counts)


def test_padded_rows_are_no_longer_than_the_ranks_need():
    dataset = from_examples([([1], [[2], [3]])] * 8, PAD)
    batches = [make_loader(dataset, packed=False, data_size=size).batch(0) for size in (1, 2, 4, 8)]
    assert [batch.microbatches[0].layout.num_tokens for batch in batches] == [64, 32, 16, 8]
    assert {batch.num_row_tokens for batch in batches} == {64}


def test_packed_rows_are_no_longer_than_the_ranks_need() -> None:
    dataset = from_examples([([1] * 100, [[2] * 100, [3] * 50])] * 8, PAD)
    tokens = []
    for size in (1, 2, 4, 8):
        batch = make_loader(dataset, row_tokens=2048, data_size=size).batch(0)
        tokens.append(batch.microbatches[0].layout.num_tokens)
        assert batch.num_row_tokens == size * tokens[-1]
    assert tokens == [2048, 1024, 512, 256]


def test_shorter_rows_can_be_cut_into_parts_of_whole_blocks() -> None:
    """Of four tensor ranks that share a row each gets a multiple of 128 tokens, as FP8 needs."""
    dataset = make_dataset(16, longest=100)
    sizes = set()
    for number in range(4, 17, 2):
        loader = make_loader(
            dataset, row_tokens=4096, global_batch_size=number, sequence_multiple=4
        )
        sizes.add(loader.batch(0).microbatches[0].layout.num_tokens)
    assert len(sizes) > 1 and max(sizes) < 4096
    assert all(size % (4 * 128) == 0 for size in sizes)


def test_padded_rows_have_few_widths():
    """The longest pair takes 64 of a row; widths are shares of it, so at most four of them."""
    pairs = [([1], [[2] * length, [3]]) for length in range(1, 63)]
    loader = make_loader(
        from_examples(pairs, PAD), packed=False, shuffle=False, global_batch_size=1, row_tokens=64
    )
    widths = [
        batch.microbatches[0].layout.num_tokens
        for batch in map(loader.batch, range(loader.steps_per_epoch))
    ]
    assert sorted(set(widths)) == [16, 32, 48, 64]
    assert all(width >= 3 + step for step, width in enumerate(widths))


def test_an_empty_row_is_all_padding():
    dataset = from_examples([([1], [[2], [3]])], PAD)
    batch = make_loader(dataset, data_size=2, data_rank=1).batch(0)
    (microbatch,) = batch.microbatches
    assert microbatch.layout.segments == () and set(microbatch.tokens.tolist()) == {PAD}
    assert len(microbatch.predict_from) == len(microbatch.example_ids) == 0
    assert batch.num_examples == 1 and fill([batch]) == 3 / 128


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"row_tokens": 9},
            "packing.row_tokens=9 cannot hold example 1, which needs 10 tokens; "
            "raise it or lower data.max_length",
        ),
        (
            {"row_tokens": 15, "packed": False},
            "packing.row_tokens=15 cannot hold example 1, which needs 16 tokens; "
            "raise it or lower data.max_length",
        ),
        (
            {"row_tokens": 63, "sequence_multiple": 2},
            "packing.row_tokens=63 is not a multiple of 2, the tensor ranks that share a row; "
            "choose one that is",
        ),
    ],
)
def test_errors(changes, message):
    dataset = from_examples([([1], [[2], [3]]), ([1] * 6, [[2, 2], [3, 3]])], PAD)
    assert refusal(lambda: make_loader(dataset, **changes)) == message


def test_an_empty_dataset_is_an_error():
    empty = make_dataset(2).subset(np.zeros(0, dtype=np.int64))
    with pytest.raises(ValueError, match="the data set is empty"):
        make_loader(empty)


def test_split_is_disjoint_deterministic_and_keeps_order():
    dataset = make_dataset(20)
    train, held_out = split(dataset, 0.25, seed=3)
    again = split(dataset, 0.25, seed=3)
    assert (len(train), len(held_out)) == (15, 5)
    assert [part.fingerprint for part in again] == [train.fingerprint, held_out.fingerprint]
    starts = [set(part.prompt_starts.tolist()) for part in (train, held_out)]
    assert not starts[0] & starts[1] and len(starts[0] | starts[1]) == 20
    assert np.all(np.diff(train.prompt_starts) > 0)
    assert split(dataset, 0.25, seed=4)[1].fingerprint != held_out.fingerprint
    single = [split(dataset, 0.01, seed)[1] for seed in range(9)]
    assert {len(part) for part in single} == {1}
    assert len({part.fingerprint for part in single}) > 1
    with pytest.raises(ValueError, match="leaves nothing to train on of 20; lower it"):
        split(dataset, 1.0, seed=3)


def test_a_fingerprint_is_of_all_that_the_data_hold() -> None:
    """A table of the reference's values, and a run that goes on, know their data by it."""
    one = [([1, 2], [[3], [4]])]
    others: list[list[TokenizedExample]] = [
        [([1, 2], [[3], [5]])],
        [([1], [[2, 3], [4]])],
        [([1, 2], [[3, 4]])],
        [([2], [[1], [1]]), ([1], [[1], [1]])],
        [([2], [[1]]), ([1], [[1]]), ([1], [[1]])],
    ]
    made = [from_examples(examples, pad_id) for examples, pad_id in ((one, 0), (one, 9))]
    made += [from_examples(examples, 0) for examples in others]
    assert len({data.fingerprint for data in made}) == len(made)
    assert from_examples(one, 0).fingerprint == made[0].fingerprint


@pytest.mark.parametrize("packed", [True, False])
def test_a_view_is_the_loader_of_another_plan(packed):
    dataset = make_dataset(30)
    plan = {"data_rank": 1, "data_size": 3, "microbatch_multiple": 2, "sequence_multiple": 4}
    view = make_loader(dataset, packed=packed).seen_by(DataView(**plan))
    fresh = make_loader(dataset, packed=packed, **plan)
    one, other = view.batch(2), fresh.batch(2)
    assert np.array_equal(one.example_indices, other.example_indices)
    for left, right in zip(one.microbatches, other.microbatches, strict=True):
        assert left.layout == right.layout and np.array_equal(left.tokens, right.tokens)
    assert fresh.seen_by(DataView(**plan)) is fresh


@pytest.mark.parametrize("scope", ["batch", "dataset"])
def test_how_often_an_example_was_seen_is_counted_from_the_step_alone(scope: str) -> None:
    loader = make_loader(make_dataset(21), scope=scope)
    counted = np.zeros(21, dtype=np.int64)
    for step in range(2 * loader.steps_per_epoch + 2):
        assert loader.seen_before(step).tolist() == counted.tolist()
        counted[loader.batch(step).example_indices] += 1


def test_examples_that_stay_together_are_shuffled_as_one() -> None:
    """Split prompts are in the batches that the whole ones are in."""
    whole, split_in_two = make_dataset(40), make_dataset(80)
    one = make_loader(whole)
    two = make_loader(split_in_two, global_batch_size=16, examples_together=2)
    assert one.steps_per_epoch == two.steps_per_epoch
    for step in range(2 * one.steps_per_epoch):
        members, _ = one.data_ranks(step)
        parts, _ = two.data_ranks(step)
        assert parts.tolist() == [2 * m + part for m in members.tolist() for part in (0, 1)]


def test_a_padded_step_looks_at_its_own_lengths_alone(monkeypatch) -> None:
    """A step must not look at all of ten million pairs."""
    loader, sizes = make_loader(make_dataset(200), packed=False), []
    slot_lengths = loading.slot_lengths

    def noting(prompts: np.ndarray, *rest):
        sizes.append(len(prompts))
        return slot_lengths(prompts, *rest)

    monkeypatch.setattr(loading, "slot_lengths", noting)
    loader.batch(1)
    assert sizes and max(sizes) == 8


@given(st.lists(st.integers(0, 5), min_size=2, max_size=40), st.integers(0, 9))
def test_single_responses_to_one_prompt_are_held_out_together(prompts, seed) -> None:
    data = from_examples([([prompt], [[n]]) for n, prompt in enumerate(prompts)], PAD)
    if len(set(prompts)) > 1:
        train, held_out = split(data, 0.01, seed)
        own = [{int(part.prompt(n)[0]) for n in range(len(part))} for part in (train, held_out)]
        assert not own[0] & own[1]


def pairs_of(rows: Sequence[RowLayout]) -> tuple[float, float]:
    """Mean (query, key) pairs of rows that see each other, by the rule of ``membership``.

    First those of prompts and responses, then padding's.
    """
    found = []
    for layout in rows:
        segment, part = membership(layout)
        ahead = np.arange(len(segment))
        sees = (segment[:, None] == segment[None]) & (ahead[None] <= ahead[:, None])
        sees &= (part[None] == 0) | (part[None] == part[:, None])
        is_padding = segment >= len(layout.segments)
        found.append((sees[~is_padding].sum(), sees[is_padding].sum()))
    whole, padding = np.mean(found, axis=0)
    return float(whole), float(padding)


@settings(max_examples=40)
@given(
    st.integers(1, 30),
    st.sampled_from(["shared", "paired"]),
    st.integers(1, 3),
    st.integers(32, 80),
    st.integers(0, 5),
)
def test_contents_are_those_of_the_packed_rows(
    num_examples: int, layout: str, num_responses: int, row_tokens: int, seed: int
) -> None:
    dataset = make_dataset(num_examples, num_responses, seed)
    loader = make_loader(dataset, layout=layout, row_tokens=max(row_tokens, 48))
    for step in range(loader.steps_per_epoch):
        found, rows = loader.row_contents(step), loader.batch(step).microbatches
        assert (found.num_rows, found.num_tokens) == (len(rows), rows[0].layout.num_tokens)
        pairs = pairs_of([row.layout for row in rows])
        # Responses of one prompt see each other's squares by half, like all else.
        assert (found.pairs, found.padding_pairs) == pytest.approx(pairs)
        assert found.predictions == pytest.approx(np.mean([len(row.targets) for row in rows]))


@settings(max_examples=25)
@given(
    st.integers(8, 40),
    st.sampled_from([1, 2, 3, 4]),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([1, 2]),
    st.sampled_from([(8, 64), (100, 1024)]),
)
def test_a_replica_s_pass_is_a_mean_over_steps(
    num_examples: int, data: int, multiple: int, tensor: int, sizes: tuple[int, int]
) -> None:
    """With rows that have one size, and with rows that have several; cut, and whole."""
    longest, row_tokens = sizes
    dataset = make_dataset(num_examples, longest=longest)
    chunks = 2 if multiple > 1 else 1
    grid = ParallelPlan(pipeline=multiple, virtual_pipeline=chunks, data=data, tensor=tensor)
    plan = replace(grid, sequence_parallel=tensor > 1)
    views = [
        make_loader(dataset, row_tokens=row_tokens, shuffle=False).seen_by(plan_view(plan, rank))
        for rank in range(data)
    ]
    steps = range(views[0].steps_per_epoch)

    def loader_of(row_tokens: int, _batches: int) -> tuple[ExampleLoader, Sequence[int]]:
        return make_loader(dataset, row_tokens=row_tokens, shuffle=False), steps

    found = rows_of(loader_of)(row_tokens, 1, plan)
    rows = [[view.batch(step).microbatches for view in views] for step in steps]
    every = [row for ranks in rows for own in ranks for row in own]
    assert found.microbatches == pytest.approx(np.mean([len(ranks[0]) for ranks in rows]))
    tokens = np.mean([row.layout.num_tokens for row in every])
    assert found.row.row_tokens == round(tokens)
    pairs = pairs_of([row.layout for row in every])
    assert (found.row.pairs, found.row.padding_pairs) == pytest.approx(pairs)
    assert found.row.predictions == pytest.approx(np.mean([len(row.targets) for row in every]))


def test_padded_rows_are_counted_and_their_padding_about_right() -> None:
    dataset = make_dataset(24)
    for layout in ("shared", "paired"):
        loader = make_loader(dataset, layout=layout, packed=False)
        found, rows = loader.row_contents(0), loader.batch(0).microbatches
        assert (found.num_rows, found.num_tokens) == (len(rows), rows[0].layout.num_tokens)
        pairs, padding = pairs_of([row.layout for row in rows])
        assert found.pairs == pytest.approx(pairs)
        assert found.predictions == pytest.approx(np.mean([len(row.targets) for row in rows]))
        assert found.padding_pairs == pytest.approx(padding, rel=0.1)
