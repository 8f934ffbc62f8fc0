"""Unpaired preference data: TRL's records, pairs taken apart, mismatched responses."""

import json
import re
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from puzzle_align.config.load import load_job
from puzzle_align.config.sections.data import DataConfig, PackingConfig
from puzzle_align.data.blocks import GivenRecords
from puzzle_align.data.build import Preparation
from puzzle_align.data.dataset import ExampleDataset, from_examples, split
from puzzle_align.data.errors import DataError
from puzzle_align.data.packed_files import write_packed
from puzzle_align.data.packing import example_lengths, first_fit_decreasing
from puzzle_align.data.pairs import Budget, BuildOptions, Limits
from puzzle_align.data.prepare import Prepared, load_pairs, packed_settings, prepare_data
from puzzle_align.data.records import taken_apart
from puzzle_align.data.tokenize import ByteTokenizer
from puzzle_align.stages.preference.data import data_warnings, job_pairs
from tests.unit.test_loader import make_loader

TOKENIZER = ByteTokenizer()
RECORDS = [
    {"prompt": "one ", "completion": "yes", "label": True},
    {"prompt": "two ", "completion": "no", "label": False},
    {"prompt": "three ", "completion": "", "label": 1},
]


def options(**changed: Any) -> BuildOptions:
    given = {"limits": Limits(64), "skip_errors": False, **changed}
    return BuildOptions("auto", budget=Budget(64, "shared", True), unpaired=True, **given)


def read(records: list[dict[str, Any]], **changed: Any):
    raw = ((f"f:{n}", record) for n, record in enumerate(records, start=1))
    return load_pairs(GivenRecords("f", raw), TOKENIZER, options(**changed), Preparation())


def prepared(path: Path, records: list[dict[str, Any]], **changed: Any) -> Prepared[ExampleDataset]:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    config = DataConfig(train=str(path), max_length=64, **changed)
    how = Preparation(path.parent / "cache")
    return prepare_data(
        config, PackingConfig(), TOKENIZER, how, add_eos="auto", seed=0, unpaired=True
    )


def texts(data: ExampleDataset, index: int) -> tuple[str, ...]:
    return tuple(
        TOKENIZER.decode(p.tolist()) for p in (data.prompt(index), data.response(index, 0))
    )


def test_records_have_one_response_and_a_label(tmp_path: Path) -> None:
    for _ in range(2):  # made, and from the cache
        data, report = (made := prepared(tmp_path / "a.jsonl", RECORDS)).train, made.report
        assert data.num_responses == 1 and data.levels is None
        assert data.labels_of(np.arange(3)).tolist() == [1, 0, 1]
        assert [texts(data, n) for n in range(3)] == [
            ("one ", "yes"),
            ("two ", "no"),
            ("three ", ""),
        ]
        assert report.summary() == "3 responses, 0 of them truncated, 2 desirable"


def apart(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    found = [raw for _, raw in taken_apart(("f:1", record) for record in records)]
    assert not any(isinstance(raw, DataError) for raw in found)
    return cast(list[dict[str, Any]], found)


def test_pairs_are_taken_apart_as_trl_does() -> None:
    """1,000 at a time: the chosen ones, then the rejected ones; the tools go with both."""
    pairs = [{"prompt": f"{n} ", "chosen": "a", "rejected": "b"} for n in range(1001)]
    parts = apart(pairs)
    named = [(raw["prompt"], raw["completion"], raw["label"]) for raw in parts]
    first = [(f"{n} ", "a", True) for n in range(1000)] + [
        (f"{n} ", "b", False) for n in range(1000)
    ]
    assert named == [*first, ("1000 ", "a", True), ("1000 ", "b", False)]
    messages = {
        "chosen": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}],
        "rejected": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "b"}],
        "tools": [{"name": "t"}],
    }
    one, two = apart([messages])
    assert one["prompt"] == two["prompt"] == messages["chosen"][:1]
    assert [one["completion"], two["completion"]] == [
        messages[n][1:] for n in ("chosen", "rejected")
    ]
    assert one["tools"] == two["tools"] == messages["tools"]
    unread = ("f:1", DataError("f:1", "invalid JSON", "it ends early", "write it again"))
    assert [*taken_apart(iter([unread]))] == [unread]


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"label": None}, "f:1: field 'label' is missing; say whether the completion is desirable"),
        ({"label": 3}, "f:1: field 'label' is 3, not true or false"),
        ({"label": "yes"}, "f:1: field 'label' is 'yes', not true or false"),
        ({"completion": None}, "f:1: field 'completion' is missing"),
        ({"completion": None, "responses": ["a"]}, "f:1: it has 'responses', a ranking, and no"),
        ({"prompt": None}, "f:1: field 'prompt' is missing"),
        ({"completion": None, "chosen": "a"}, "f:1: field 'rejected' is missing"),
        (
            {"completion": [{"role": "assistant", "content": "a"}]},
            "not both strings or both message",
        ),
    ],
)
def test_a_bad_record_is_one_line(changed: dict[str, Any], expected: str) -> None:
    with pytest.raises(DataError, match=expected.replace("(", r"\(")):
        read([{**RECORDS[0], **changed}])
    _, report = read([{**RECORDS[0], **changed}, RECORDS[1]], skip_errors=True)
    assert report.num_used == 1 and sum(report.skipped.values()) == 1 and report.num_desirable == 0


def test_packed_files_are_of_one_kind(tmp_path: Path) -> None:
    data, _ = read(RECORDS)
    lengths = example_lengths(data.prompt_lengths, data.response_lengths, "shared")
    config = DataConfig(format="packed", train=str(tmp_path / "packed"))
    settings = packed_settings(config, PackingConfig(), "auto")
    rows = first_fit_decreasing(lengths, PackingConfig().row_tokens)
    write_packed(tmp_path / "packed", data, rows, settings, TOKENIZER)
    open_packed = partial(
        prepare_data, config, PackingConfig(), TOKENIZER, Preparation(), add_eos="auto", seed=0
    )
    loaded = open_packed(unpaired=True)
    assert loaded.train.labels_of(np.arange(3)).tolist() == [1, 0, 1]
    with pytest.raises(ValueError, match="holds single responses; prepare the data with this job"):
        open_packed()


@pytest.mark.parametrize(
    ("labels", "weights", "expected"),
    [
        ([1, 0, 1, 0], "desirable_weight=1.0", None),
        (
            [1, 0, 0, 0],
            "desirable_weight=1.0",
            "1 responses are desirable and 3 are not.*from 3.00 to 4.00, or kto.undesirable_weight "
            "from 0.25 to 0.33",
        ),
        ([1, 0, 0, 0], "desirable_weight=3.5", None),
        (
            [1, 1, 1, 0],
            "desirable_weight=0.3",
            "3 responses are desirable and 1 are not.*from 0.33 to 0.44",
        ),
        ([1, 1, 1, 0], "desirable_weight=0.4", None),
        (
            [1, 1, 1, 0],
            "desirable_weight=0.5",
            "3 responses are .* from 0.33 to 0.44, or kto.undesirable_weight from 1.12 to 1.50",
        ),
        ([1, 0, 0, 0], "undesirable_weight=0.3", None),
        ([1, 0, 0, 0], "undesirable_weight=0.5", "3 are not.* from 1.50 to 2.00, .* 0.25 to 0.33"),
        ([1, 1, 1, 1], "desirable_weight=1.0", "only desirable responses train the policy"),
        ([1, 1, 0, 0], "desirable_weight=0.0", "only undesirable responses train the policy"),
    ],
)
def test_weights_that_do_not_make_up_for_unequal_numbers_are_reported(
    tmp_path: Path, labels: list[int], weights: str, expected: str | None
) -> None:
    rows = [{"prompt": f"{n} ", "completion": "c", "label": bool(x)} for n, x in enumerate(labels)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    keys = [f"data.train={tmp_path}/a.jsonl", f"kto.{weights}"]
    job = load_job("stage: kto", [*keys, f"output_dir={tmp_path}"])
    warnings = [*data_warnings(job, job_pairs(job, TOKENIZER))]
    assert len(warnings) == (expected is not None)
    assert expected is None or re.search(expected, warnings[0])


@pytest.mark.parametrize(("name", "warns"), [("question", True), ("prompt", False)])
def test_prompts_that_are_empty_are_reported(tmp_path: Path, name: str, warns: bool) -> None:
    rows = [{name: f"{n}? ", "chosen": f"{n}", "rejected": "-"} for n in range(4)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    job = load_job("stage: dpo", [f"data.train={tmp_path}/a.jsonl", f"output_dir={tmp_path}"])
    warnings = [*data_warnings(job, job_pairs(job, TOKENIZER))]
    assert len(warnings) == warns
    assert not warns or warnings[0].startswith("4 of 4 prompts are empty; if the data have them in")


PARTS = st.lists(
    st.tuples(st.integers(0, 9), st.integers(1, 9)), min_size=2, max_size=24
)  # tokens of prompt and response


@given(
    parts=PARTS,
    data_size=st.integers(1, 3),
    packed=st.booleans(),
    scope=st.sampled_from(["batch", "dataset"]),
    longest=st.integers(10, 18),
    seed=st.integers(0, 9),
)
def test_every_prompt_of_a_step_gets_the_response_before_its_own(
    parts: list, data_size: int, packed: bool, scope: str, longest: int, seed: int
) -> None:
    """A step's rows, over all ranks: its prompts, each with its neighbour's response, cut."""
    tokens = iter(range(1, 10_000))
    data = from_examples(
        [([next(tokens) for _ in range(p)], [[next(tokens) for _ in range(r)]]) for p, r in parts],
        pad_id=0,
    )

    given = {"packed": packed, "scope": scope if packed else "batch", "seed": seed}
    loader = partial(make_loader, data, global_batch_size=4, row_tokens=24, **given)
    own = loader(data_size=data_size)
    for step in range(own.steps_per_epoch):
        members = own.batch(step).example_indices.tolist()
        found = {}
        for data_rank in range(data_size):
            view = loader(data_rank=data_rank, data_size=data_size).mismatched(step, longest)
            assert view.steps_per_epoch == 1
            for row in view.batch(0).microbatches:
                for segment, example in zip(row.layout.segments, row.example_ids, strict=True):
                    assert int(example) not in found
                    start = segment.start
                    end = start + segment.prompt_length + segment.response_lengths[0]
                    found[int(example)] = row.tokens[start:end].tolist()
        assert sorted(found) == list(range(len(members)))
        by_first = {data.response(member, 0)[0]: member for member in members}
        partners = []
        for position, member in enumerate(members):
            prompt = data.prompt(member).tolist()
            partners.append(by_first[found[position][len(prompt)]])
            response = data.response(partners[-1], 0).tolist()
            assert found[position] == (prompt + response)[:longest]
        assert sorted(partners) == sorted(members)
        if given["scope"] == "batch":
            assert partners == [members[position - 1] for position in range(len(members))]
        else:
            assert len(members) == 1 or all(a != b for a, b in zip(partners, members, strict=True))


def test_in_rows_of_the_whole_data_few_prompts_get_their_own_other_response() -> None:
    """Four responses to each prompt, of equal length: by length they are side by side."""
    parts = [([n // 4 + 1] * 8, [[500 + n] * 4]) for n in range(400)]
    loader = make_loader(
        from_examples(parts, pad_id=0), global_batch_size=32, row_tokens=96, scope="dataset"
    )
    same = number = 0
    for step in range(loader.steps_per_epoch):
        for row in loader.mismatched(step, 64).batch(0).microbatches:
            for segment in row.layout.segments:
                prompt, response = row.tokens[segment.start], row.tokens[segment.start + 8]
                same += prompt == (response - 500) // 4 + 1
                number += 1
    assert number >= 400 and same / number < 0.15


def test_each_step_over_rows_of_the_whole_data_draws_an_order_of_its_own() -> None:
    """Eight responses of equal length a step, so that a step's examples are paired by place."""
    parts = [([n] * 2, [[500 + n] * 2]) for n in range(32)]
    loader = make_loader(
        from_examples(parts, pad_id=0), global_batch_size=8, row_tokens=16, scope="dataset"
    )

    def partners(step: int) -> list[int]:
        """The place, in the step's examples, of each one's partner."""
        members = loader.batch(step).example_indices
        data = loader.mismatched(step, 64).dataset
        others = [int(data.response(n, 0)[0]) - 500 for n in range(len(members))]
        return [members.tolist().index(other) for other in others]

    assert len({tuple(partners(step)) for step in range(loader.steps_per_epoch)}) > 1
    assert partners(1) == partners(1)


def test_responses_to_one_prompt_are_held_out_together() -> None:
    data, _ = read(
        [{"prompt": f"{n % 10} ", "completion": f"{n}", "label": n % 3 == 0} for n in range(40)]
    )
    train, held_out = split(data, 0.25, seed=1)
    prompts = [{texts(own, n)[0] for n in range(len(own))} for own in (train, held_out)]
    assert len(prompts[0]) == 8 and len(prompts[1]) == 2 and not prompts[0] & prompts[1]
    assert (len(train), len(held_out)) == (32, 8)  # 10 asked for, of groups of 4
    order = [int(texts(train, n)[1]) for n in range(len(train))]
    assert order == sorted(order)
    sizes = [*[20] * 9, 100]
    uneven = [
        {"prompt": f"{p} ", "completion": f"{n}", "label": n % 2 == 0}
        for p, size in enumerate(sizes)
        for n in range(size)
    ]
    for seed in range(20):  # a prompt with more responses than asked for is not held out
        assert len(split(read(uneven)[0], 0.1, seed)[1]) == 20
        assert len(split(read(uneven)[0], 0.01, seed)[1]) == 20  # but the smallest is
    one, _ = read([{"prompt": "", "completion": f"{n}", "label": 1} for n in range(5)])
    for everything, share, cure in ((data, 1.0, "lower it"), (one, 0.2, "set it to 0")):
        match = rf"leaves nothing to train on of \d+; {cure}, or .* data.eval"
        with pytest.raises(ValueError, match=match):
            split(everything, share, seed=1)
