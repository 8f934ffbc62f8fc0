"""tools/bench_generate.py on one small layer: both answer alike, and the figures agree."""

import json

import pytest

from tests.e2e.launch import ROOT, run_tool

SIZES = "--prompt-length 16 --max-new-tokens 12 --layers 1 --hidden 64 --vocabulary 300"


def test_both_answer_alike_and_figures_agree() -> None:
    asked = ("--prompts", "5", "2", "--repeats", "1", "--threads", "1", "--decode-batch-size", "2")
    done = run_tool(ROOT / "tools" / "bench_generate.py", *SIZES.split(), *asked)
    assert done.returncode == 0, done.stderr
    result, other = json.loads(done.stdout)["runs"]
    assert (result["prompts"], other["prompts"]) == (5, 2)
    assert other["same_responses"] == len(other["response_lengths"]) == 2
    assert result["same_responses"] == len(result["response_lengths"]) == 5
    assert len(set(result["response_lengths"])) > 2
    assert result["response_tokens"] == sum(result["response_lengths"])
    for name, (seconds,) in result["seconds"].items():
        rate = result["tokens_per_second"][name]
        assert rate * seconds == pytest.approx(result["response_tokens"])
    (ours,), (theirs,) = result["seconds"].values()
    assert result["ratio"] == pytest.approx(theirs / ours)
