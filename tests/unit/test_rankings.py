"""Rankings: K responses with scores or ranks, from the records to rows, losses and packed files."""

import json
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from puzzle_align.algos.preference import bradley_terry_loss, ranking_losses
from puzzle_align.config.load import find_config, load_file
from puzzle_align.config.sections.data import Comparisons, DataConfig, PackingConfig
from puzzle_align.data.build import Preparation
from puzzle_align.data.dataset import ExampleDataset, contiguous
from puzzle_align.data.errors import DataError, NoComparison
from puzzle_align.data.loader import DataView, ExampleLoader
from puzzle_align.data.packed_files import load_packed, write_packed
from puzzle_align.data.packing import example_lengths, first_fit_decreasing
from puzzle_align.data.prepare import Prepared, packed_settings, prepare_data
from puzzle_align.data.records import to_record
from puzzle_align.data.tokenize import ByteTokenizer
from puzzle_align.runtime.row_input import to_device
from puzzle_align.stages.preference.data import job_pairs
from tests.refusals import refusal

CPU = torch.device("cpu")
RANKED = {"prompt": "q", "responses": ["b", "d", "a", "c"], "scores": [3, 1, 4.5, 1]}
ULTRAFEEDBACK = {
    "source": "evol_instruct",
    "instruction": "q",
    "models": ["m1", "m2", "m3", "m4"],
    "completions": [
        {"model": "m", "response": text, "overall_score": score, "fine-grained_score": 1.0}
        for text, score in zip(RANKED["responses"], RANKED["scores"], strict=True)
    ],
    "correct_answers": ["None"],
}


def read(folder: Path, rows: list[dict[str, Any]], **options: Any) -> Prepared[ExampleDataset]:
    source = folder / "rankings.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = DataConfig(train=str(source), **options)
    how = Preparation(folder / "cache")
    return prepare_data(config, PackingConfig(), ByteTokenizer(), how, add_eos=False, seed=0)


def texts(data: ExampleDataset, example: int) -> list[str]:
    return [bytes(data.response(example, k).tolist()).decode() for k in range(data.num_responses)]


@pytest.mark.parametrize(
    "row",
    [
        RANKED,
        {**RANKED, "scores": ["3", "1", "4.5", "1.0"], "tools": "no JSON: not read with texts"},
        {"prompt": "q", "responses": RANKED["responses"], "ranks": [2, 3, 1, 3]},
        ULTRAFEEDBACK,
    ],
)
def test_responses_are_sorted_the_best_first(row: dict[str, Any]) -> None:
    record = to_record(row, "a:1")
    assert record.prompt == "q" and record.responses == ("a", "b", "d", "c")
    assert record.tied == (False, False, False, True)


def test_messages_are_rankings_too() -> None:
    message = {"role": "assistant", "content": "a"}
    other = [{"role": "assistant", "content": "b"}]
    user = [{"role": "user", "content": "q"}]
    record = to_record({"prompt": user, "responses": [other, message], "ranks": [2, 1]}, "a:1")
    assert record.prompt == user and record.responses == ([message], other)


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"scores": None}, "field 'scores' is missing beside 'responses'"),
        ({"ranks": [1, 2, 3, 4]}, "it has both 'scores' and 'ranks' beside 'responses'"),
        ({"scores": [1, 2]}, "field 'scores' has 2 numbers for 4 responses"),
        ({"scores": 1}, "field 'scores' is int for 4 responses"),
        ({"scores": [1, 2, 3, "x"]}, "field 'scores', number 3, is 'x', not a finite number"),
        ({"responses": "abcd"}, "field 'responses' is not a list"),
        ({"responses": ["a", None, "c", "d"]}, "field 'responses[1]' is missing"),
        ({"responses": ["a", 1, "c", "d"]}, "field 'responses[1]' is int, not a string or a"),
        ({"prompt": [{"role": "user", "content": "q"}]}, "'prompt' and 'responses' are not all"),
    ],
)
def test_a_bad_ranking_is_reported_in_one_line(change: dict[str, Any], line: str) -> None:
    found = refusal(lambda: to_record({**RANKED, **change}, "f.jsonl:7"), DataError)
    assert found.startswith(f"f.jsonl:7: {line}") and found.count("; ") == 1


def test_bad_completions_are_reported() -> None:
    for completions in ("text", ["text"]):
        row = {**ULTRAFEEDBACK, "completions": completions}
        line = refusal(lambda row=row: to_record(row, "f:1"), DataError)
        assert line.startswith("f:1: field 'completions' is not a list of objects; give ")


@pytest.mark.parametrize(
    "row",
    [
        {**RANKED, "scores": [2, 2, 2, 2]},
        {**RANKED, "responses": ["a"], "scores": [1]},
        {**RANKED, "responses": [], "scores": []},
    ],
)
def test_a_row_without_a_comparison_is_left_out(tmp_path: Path, row: dict[str, Any]) -> None:
    with pytest.raises(NoComparison):
        to_record(row, "f:1")
    report = read(tmp_path, [row, RANKED]).report
    assert (report.num_used, report.num_uncompared, report.num_comparisons) == (1, 1, 5)
    assert report.summary() == (
        "1 examples of 5 comparisons, 0 of them truncated; left out 1 of which no response is "
        "better than another"
    )


def test_rankings_and_pairs_in_one_file(tmp_path: Path) -> None:
    rows = [
        {"prompt": "p", "chosen": "good", "rejected": "bad"},
        RANKED,
        {"prompt": "r", "responses": ["x", "y", "z"], "scores": [1, 1, 2]},
    ]
    first, again = (read(tmp_path, rows).train for _ in range(2))
    for data in (first, again):
        assert [texts(data, example) for example in range(3)] == [
            ["good", "bad", "", ""],
            ["a", "b", "d", "c"],
            ["z", "x", "y", ""],
        ]
        assert data.levels is not None
        assert data.levels.tolist() == [[0, 1, -1, -1], [0, 1, 2, 2], [0, 1, 1, -1]]
        assert data.comparisons(np.array([2, 0])).tolist() == [[0, 0, 1], [0, 0, 2], [1, 0, 1]]
        assert data.num_comparisons(np.arange(3)) == 1 + 5 + 2
        assert data.num_predicted(np.array([0])).tolist() == [[4, 3, 0, 0]]
    assert first.fingerprint == again.fingerprint
    rows[2]["scores"] = [1, 0, 2]
    assert read(tmp_path, rows).train.fingerprint != first.fingerprint


def test_the_best_is_compared_with_the_rest(tmp_path: Path) -> None:
    rows = [RANKED, {**RANKED, "scores": [4, 1, 4, 0]}]
    data = read(tmp_path, rows, comparisons="best").train
    assert texts(data, 0) == ["a", "b", "d", "c"] and texts(data, 1) == ["b", "d", "c", ""]
    assert data.levels is not None and data.levels.tolist() == [[0, 1, 1, 1], [0, 1, 1, -1]]
    assert data.comparisons(np.arange(2)).tolist() == [
        [0, 0, 1], [0, 0, 2], [0, 0, 3], [1, 0, 1], [1, 0, 2],
    ]  # fmt: skip


def test_examples_held_out_keep_their_places(tmp_path: Path) -> None:
    """Numbers of responses tell the rows apart: a pair, and rankings of three and of four."""
    comparisons = {2: [[0, 1]], 3: [[0, 1], [0, 2]], 4: [[0, 1], [0, 2], [0, 3], [1, 2], [1, 3]]}
    rows = [
        {"prompt": "p", "chosen": "good", "rejected": "bad"},
        {"prompt": "r", "responses": ["x", "y", "z"], "scores": [1, 1, 2]},
        RANKED,
    ]
    data = read(tmp_path, rows * 4, eval_fraction=0.5)
    assert data.eval is not None and len(data.train) == len(data.eval) == 6
    for part in (data.train, data.eval):
        for example in range(6):
            number = int((part.response_lengths[example] > 0).sum())
            compared = part.comparisons(np.array([example]))[:, 1:].tolist()
            assert compared == comparisons[number], f"example {example} of {number} responses"


def test_two_ranked_responses_are_a_pair(tmp_path: Path) -> None:
    pair = read(tmp_path, [{"prompt": "p", "chosen": "good", "rejected": "bad"}]).train
    row = {"prompt": "p", "responses": ["bad", "good"], "scores": [1, 2]}
    ranked = read(tmp_path, [row]).train
    assert ranked.levels is None and ranked.fingerprint == pair.fingerprint


@st.composite
def rankings(draw: st.DrawFn) -> ExampleDataset:
    """Rankings of two to four responses with ties, and lengths of up to seven tokens."""
    most = draw(st.integers(3, 4))
    numbers = [most, *draw(st.lists(st.integers(2, most), max_size=5))]
    lengths, levels = [], []
    for number in numbers:
        parts = draw(st.lists(st.integers(1, 7), min_size=number + 1, max_size=number + 1))
        lengths.append(parts + [0] * (most - number))
        ties = draw(st.lists(st.booleans(), min_size=number - 2, max_size=number - 2))
        own = np.cumsum([0, 1, *(0 if tie else 1 for tie in ties)]).tolist()
        levels.append(own + [-1] * (most - number))
    parts = np.array(lengths, np.int32)
    tokens = np.arange(parts.sum(), dtype=np.int32)  # all different
    return contiguous(tokens, parts, 0, "x", levels=np.array(levels, np.int32))


def loader(data: ExampleDataset, layout: str, packed: bool, **options: Any) -> ExampleLoader:
    return ExampleLoader(
        data,
        global_batch_size=len(data),
        row_tokens=160,
        layout=layout,
        packed=packed,
        scope="batch",
        seed=0,
        shuffle=True,
        view=DataView(),
        **options,
    )


@pytest.mark.parametrize("layout", ["shared", "paired"])
@pytest.mark.parametrize("packed", [True, False])
@settings(deadline=None, max_examples=30)
@given(data=rankings())
def test_rows_hold_every_response_once_and_all_comparisons(
    layout: str, packed: bool, data: ExampleDataset
) -> None:
    batch = loader(data, layout, packed).batch(0)
    members, seen, numbers = batch.example_indices, [], []
    expected = data.comparisons(members)
    for microbatch in batch.microbatches:
        at = [s for segment in microbatch.layout.segments for s in segment.response_spans()]
        slots = zip(microbatch.example_ids.tolist(), microbatch.branch_ids.tolist(), strict=True)
        for (start, end), (example, branch) in zip(at, slots, strict=True):
            response = data.response(int(members[example]), branch)
            assert microbatch.tokens[start:end].tolist() == response.tolist()
            seen.append((int(members[example]), branch))
        row = to_device(microbatch, "segments", CPU)
        assert row.comparisons is not None and microbatch.comparisons is not None
        values = torch.arange(len(data) * 10.0).reshape(-1, 10)[row.examples, : row.lengths.size(1)]
        cells = values.flatten()  # ten times the example in the batch, and the response
        for compared, found in zip(
            (row.comparisons.better, row.comparisons.worse), (2, 3), strict=True
        ):
            wanted = 10 * microbatch.comparisons[:, 1] + microbatch.comparisons[:, found]
            assert cells[compared].tolist() == wanted.tolist()
        numbers += row.comparisons.numbers.tolist()
        assert (microbatch.comparisons[:, 1:] == expected[microbatch.comparisons[:, 0]]).all()
    assert sorted(numbers) == list(range(len(expected)))
    there = np.argwhere(data.response_lengths > 0).tolist()
    assert sorted(seen) == [tuple(place) for place in there]
    copies = 1 if layout == "shared" else (data.response_lengths > 0).sum(axis=1)
    assert batch.num_tokens == int(
        (copies * data.prompt_lengths).sum() + data.response_lengths.sum()
    )


@pytest.mark.parametrize("layout", ["shared", "paired"])
@settings(deadline=None, max_examples=20)
@given(data=rankings())
def test_packed_files_hold_rankings(
    layout: str, data: ExampleDataset, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("packed") / "rows"
    lengths = example_lengths(data.prompt_lengths, data.response_lengths, layout)
    packing, tokenizer = PackingConfig(row_tokens=160, layout=layout), ByteTokenizer()
    kept = packed_settings(DataConfig(), packing, "auto")
    write_packed(path, data, first_fit_decreasing(lengths, 160), kept, tokenizer)
    again = load_packed(path, tokenizer, kept).dataset
    assert data.levels is not None and again.levels is not None
    assert (again.levels == data.levels).all()
    for example, branch in np.argwhere(data.response_lengths > 0).tolist():
        assert (again.response(example, branch) == data.response(example, branch)).all()
        assert (again.prompt(example) == data.prompt(example)).all()
    others = packed_settings(DataConfig(comparisons="best"), packing, "auto")
    assert "data.comparisons='all'; this job has data.comparisons='best'" in refusal(
        lambda: load_packed(path, tokenizer, others)
    )


def drawn_in_order(scores: list[float], levels: list[int]) -> float:
    """Probability that every response is drawn before all worse ones, if equals do not compete.

    Of distinct levels, that of the order alone: each draw is in proportion to ``exp(score)``.
    """
    total = 1.0
    for score, level in zip(scores, levels, strict=True):
        rest = [other for other, lower in zip(scores, levels, strict=True) if lower > level]
        weights = np.exp([score, *rest])
        total *= weights[0] / weights.sum()
    return total


def compared(scores: torch.Tensor, levels: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Margins and groups of one ranking's pairs."""
    pairs = [
        (better, worse)
        for better in range(len(levels))
        for worse in range(len(levels))
        if levels[better] < levels[worse]
    ]
    better, worse = torch.tensor(pairs).T
    return scores[better] - scores[worse], torch.unique(better, return_inverse=True)[1]


@pytest.mark.parametrize("levels", [[0, 1], [0, 1, 2, 3], [0, 1, 1, 2], [0, 0, 1], [0, 1, 1, 1]])
def test_plackett_luce_is_the_probability_of_the_order(levels: list[int]) -> None:
    generator = torch.Generator().manual_seed(len(levels))
    scores = 3 * torch.randn(len(levels), dtype=torch.float64, generator=generator)
    scores.requires_grad_()
    losses = ranking_losses(*compared(scores, levels))
    expected = -np.log(drawn_in_order(scores.tolist(), levels))
    assert losses.sum().item() == pytest.approx(expected, rel=1e-12)
    assert torch.autograd.gradcheck(lambda s: ranking_losses(*compared(s, levels)).sum(), scores)


def test_the_probabilities_of_all_orders_sum_to_one() -> None:
    scores = torch.tensor([0.3, -1.2, 2.0, 0.9], dtype=torch.float64)
    total = sum(
        torch.exp(-ranking_losses(*compared(scores[list(order)], [0, 1, 2, 3])).sum()).item()
        for order in permutations(range(4))
    )
    assert total == pytest.approx(1, rel=1e-12)


def test_rankings_far_apart_overflow_nowhere() -> None:
    scores = torch.tensor([-800.0, 0.0, 800.0], requires_grad=True)
    loss = ranking_losses(*compared(scores, [0, 1, 2])).sum()
    loss.backward()
    assert loss.item() == pytest.approx(2400) and scores.grad is not None
    assert torch.isfinite(scores.grad).all()


def test_of_pairs_plackett_luce_is_bradley_terry() -> None:
    margins = torch.tensor([0.5, -2.0, 7.0], dtype=torch.float64)
    zeros, groups = torch.zeros_like(margins), torch.arange(3)
    expected = bradley_terry_loss(margins, zeros, zeros)
    assert torch.allclose(ranking_losses(margins, groups), expected, rtol=1e-12)
    assert torch.equal(ranking_losses(margins, None), expected)


@pytest.mark.parametrize("comparisons", ["all", "best"])
def test_losses_are_means_over_rankings(comparisons: Comparisons, tmp_path: Path) -> None:
    """The mean over all pairs of a batch is the mean of the rankings' losses."""
    rows = [RANKED, {"prompt": "r", "responses": ["x", "y", "z"], "scores": [1, 1, 2]}]
    data = read(tmp_path, rows, comparisons=comparisons).train
    pairs = data.comparisons(np.arange(2))
    scores = torch.randn(2, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    examples, better, worse = torch.from_numpy(pairs).T
    margins = scores[examples, better] - scores[examples, worse]
    groups = torch.unique(examples * 4 + better, return_inverse=True)[1]
    found = ranking_losses(margins, groups, len(pairs) / 2).mean().item()
    assert data.levels is not None
    expected = [
        -np.log(drawn_in_order(scores[i, :number].tolist(), data.levels[i, :number].tolist()))
        for i, number in enumerate((4, 3))
    ]
    assert found == pytest.approx(np.mean(expected), rel=1e-12)


@pytest.mark.parametrize("key", ["dpo.ld_alpha=0.5", "dpo.nll_scope=sequence"])
def test_what_needs_pairs_refuses_rankings(key: str, tmp_path: Path) -> None:
    source = tmp_path / "rankings.jsonl"
    source.write_text(json.dumps(RANKED))
    own = [f"data.train={source}", "data.format=auto", f"data.cache_dir={tmp_path}/cache"]
    job = load_file(find_config("dpo_tiny"), [*own, "data.eval_fraction=0", key])
    line = refusal(lambda: job_pairs(job, ByteTokenizer()))
    assert line.startswith(f"{key.removesuffix('=0.5')}: needs pairs, but data.train has more than")


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 2) | st.floats() | st.sampled_from(["a", "", "1"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["role", "content", "from", "value", "response", "overall_score"]),
            inner,
            max_size=3,
        )
    ),
    max_leaves=6,
)


FIELDS = ["prompt", "responses", "scores", "ranks", "instruction", "completions"]
TEXTS, NUMBERS = st.sampled_from(["a", "b", ""]), st.integers(-1, 1) | st.sampled_from([0.5, "1"])


def three(each: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.lists(each, min_size=3, max_size=3)


RATED = st.fixed_dictionaries({"response": TEXTS, "overall_score": NUMBERS})
SOUND = st.one_of(
    *(
        st.fixed_dictionaries(
            {"prompt": st.just("q"), "responses": three(TEXTS), name: three(NUMBERS)}
        )
        for name in ("scores", "ranks")
    ),
    st.fixed_dictionaries({"instruction": st.just("q"), "completions": three(RATED)}),
)
CHANGES = st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=4)


@settings(deadline=None, max_examples=300)
@given(row=st.just({}) | SOUND, changes=CHANGES, comparisons=st.sampled_from(["all", "best"]))
def test_any_row_is_a_ranking_or_one_line(
    row: dict[str, Any], changes: dict[str, Any], comparisons: Comparisons
) -> None:
    try:
        record = to_record({**row, **changes}, "f:1", comparisons)
    except DataError as error:
        assert str(error).startswith("f:1: ") and "\n" not in str(error)
    else:
        assert len(record.tied) == len(record.responses) >= 2
        assert not all(record.tied)
