"""README's example from Python, shortened: it trains, returns its metrics, answers prompts."""

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import puzzle_align
from tests.dist.spawn import run_alone
from tests.refusals import refusal

NO_DATA = (
    "data.format=auto",
    "data.train=no.jsonl",
    "actor.model.random_weights=true",
    "tokenizer.path=byte",
)
README = Path(__file__).parents[2] / "README.md"


def example() -> str:
    """The indented block that imports the package."""
    lines = README.read_text(encoding="utf-8").splitlines()
    start = next(
        n for n, line in enumerate(lines) if line.startswith("    from puzzle_align import")
    )
    block = []
    for line in lines[start:]:
        if line and not line.startswith("    "):
            break
        block.append(line[4:])
    return "\n".join(block)


def run_example(folder: str) -> dict[str, Any]:
    """What the names of the example are after it ran in ``folder``."""
    os.chdir(folder)
    short = '"max_steps=3", "global_batch_size=8", "data.num_synthetic=64", "output_dir='
    code = example().replace('"output_dir=', short)
    assert code.count("max_steps=3") == 1
    answers: list[Any] = []
    names: dict[str, Any] = {"print": answers.append}
    exec(compile(code, str(README), "exec"), names)
    again = replace(names["config"], output_dir="runs/second")
    missing = puzzle_align.load_config("dpo_tiny", "output_dir=runs/third", *NO_DATA)
    too_long = "generation.max_new_tokens=9999"
    errors = [
        refusal(lambda: names["train"](missing)),
        refusal(lambda: names["generate"]("runs/first", ["a"], too_long)),
        refusal(lambda: names["generate"]("runs/first", ["a"], "actor.model.path=x")),
    ]
    lines = ["a\u2028b", "c\x85d"]  # ends of lines to str.splitlines, not in JSON
    answered = names["generate"]("runs/first", lines, "generation.max_new_tokens=2")
    assert [row["prompt"] for row in answered] == lines
    done = names["train"](again)
    config = replace(names["config"], output_dir="runs/other")
    resumed = replace(config.checkpoint, resume="runs/first/checkpoints/step_00000003")
    config = replace(config, checkpoint=resumed)
    assert names["train"](config) == []  # nothing is left to train
    for steps in (4, 5):  # the second time from the checkpoint that the first one saved
        metrics = names["train"](replace(config, max_steps=steps))
        trained = [line["step"] for line in metrics if "loss" in line]
        assert trained == [*range(4, steps + 1)]
    return {"metrics": names["metrics"], "answers": answers, "again": done, "errors": errors}


def test_the_example_of_the_readme(tmp_path: Path) -> None:
    ran = run_alone(run_example, str(tmp_path))
    kept = (tmp_path / "runs" / "first" / "metrics.jsonl").read_text().splitlines()
    assert ran["metrics"] == [json.loads(line) for line in kept]
    steps = [line["step"] for line in ran["metrics"] if "loss" in line]
    assert steps == [1, 3]  # the first and the last of those that are logged
    losses = [[line.get("loss") for line in ran[name]] for name in ("metrics", "again")]
    assert losses[0] == losses[1], "a second training in a process is the first one's"
    # Between the two trainings, two calls failed.
    no_data, too_long, wrong_key = ran["errors"]
    assert "no.jsonl" in no_data and "9999" in too_long
    assert wrong_key.startswith("override 'actor.model.path=x': generate does not read 'actor.mod")
    last, answers = ran["answers"]
    assert last == ran["metrics"][-1]
    (answer,) = answers
    assert answer["prompt"] == "letters: " and 0 < len(answer["tokens"]) <= 16


def test_unknown_names_and_wrong_keys_are_one_line() -> None:
    with pytest.raises(AttributeError, match="no attribute 'evaluate'"):
        puzzle_align.evaluate  # noqa: B018
    line = refusal(lambda: puzzle_align.load_config("dpo_tiny", "dpo.bta=1"))
    assert "unknown key 'dpo.bta'; the nearest known one is 'dpo.beta'" in line


def test_a_text_is_not_taken_for_a_file_of_prompts() -> None:
    line = "prompts: expected a list of texts, got a text; put it in brackets"
    assert refusal(lambda: puzzle_align.generate("runs/none", "a")) == line
