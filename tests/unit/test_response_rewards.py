"""Rewards of responses: the sum of model and functions, prompts of messages, no number."""

import json
import logging
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from puzzle_align.config.job import JobConfig
from puzzle_align.config.load import load_job
from puzzle_align.data.prompts import PromptDataset
from puzzle_align.data.tokenize import ByteTokenizer
from puzzle_align.runtime.columns import Responses
from puzzle_align.runtime.generation.sampling import Response
from puzzle_align.stages.rewards.functions import load_reward_function
from puzzle_align.stages.rl import rewards
from puzzle_align.stages.rl.prompts import job_prompts
from puzzle_align.stages.rl.rewards import Functions, Rewarded, Rewards
from puzzle_align.stages.rl.rollout import Rollout
from tests.refusals import refusal
from tests.unit.test_reward_functions import in_process

STOP = 258
JOB = """
stage: ppo
data: {format: synthetic, num_synthetic: 8, max_length: 32}
generation: {max_new_tokens: 8}
reward: {function: "puzzle_align.data.synthetic:vowel_share"}
"""
MODULE = "tests.unit.grpo_rewards"


def prompts_of(job: JobConfig) -> PromptDataset:
    return job_prompts(job, ByteTokenizer()).train


def sampled_texts(
    prompts: PromptDataset, rows: list[int], texts: list[str], iteration: int = 0
) -> Rollout:
    """The texts as responses, as many to each prompt: stopped, but for the last one."""
    last = len(texts) - 1
    sampled = {}
    for number, text in enumerate(texts):
        ids = [*text.encode()] + [STOP] * (number != last)
        probs = np.zeros(len(ids), np.float32)
        sampled[number] = Response(number, np.array(ids, dtype=np.int64), probs, number != last)
    return Rollout(
        iteration=iteration,
        batch=2 * iteration,
        prompts=np.array(rows),
        prompt_lengths=prompts.prompt_lengths[rows].astype(np.int64),
        stopped=np.array([response.stopped for response in sampled.values()]),
        responses=Responses(
            np.array([len(response.tokens) for response in sampled.values()]),
            owners=np.zeros(len(texts), dtype=np.int64),
        ),
        num_generations=len(texts) // len(rows),
        sampled=sampled,
    )


def opened(job: JobConfig, prompts: PromptDataset) -> Rewards:
    functions = in_process([load_reward_function(name) for name in job.reward.functions])
    return Rewards(job, prompts, ByteTokenizer(), 10, functions)


def rewarded(
    job: JobConfig,
    prompts: PromptDataset,
    rows: list[int],
    texts: list[str],
    by_model: list[float] | None = None,
    iteration: int = 0,
) -> Rewarded:
    """The rewarded texts; ``by_model``: the reward model's rewards."""
    rollout = sampled_texts(prompts, rows, texts, iteration)
    numbers = None
    if by_model is not None:
        numbers = {sample: np.array([reward]) for sample, reward in enumerate(by_model)}
    return opened(job, prompts).scores(rollout, numbers)


def _scores(folder: Path, by_model: list[float], *overrides: str) -> np.ndarray:
    """Scores of ``aab`` and a stop token, and of ``i`` cut off, both to the prompt in row 5."""
    job = load_job(JOB, [f"output_dir={folder}", *overrides])
    return rewarded(job, prompts_of(job), [5], ["aab", "i"], by_model).scores


def test_model_and_function_are_summed(tmp_path: Path) -> None:
    assert _scores(tmp_path, [0.5, -2.0]) == pytest.approx([0.5 + 2 / 3, -2.0 + 1.0])
    weighed = _scores(tmp_path, [0.5, -2.0], "reward.weights=[-3]")
    assert weighed == pytest.approx([0.5 - 2.0, -2.0 - 3.0])
    functions = f"[puzzle_align.data.synthetic:vowel_share, {MODULE}:marked]"  # neither is marked
    partly = _scores(tmp_path, [0.5, -2.0], f"reward.function={functions}")
    assert partly == pytest.approx([0.5 + 2 / 3, -2.0 + 1.0])


def test_where_no_function_applies_the_model_s_reward_is_all(tmp_path: Path) -> None:
    found = _scores(tmp_path, [0.5, -2.0], f"reward.function={MODULE}:marked")
    assert found.tolist() == [0.5, -2.0]


def test_a_reward_model_that_gives_no_number_is_named(tmp_path: Path) -> None:
    assert refusal(lambda: _scores(tmp_path, [0.5, float("nan")])) == (
        "reward.model: its reward of response 1 to prompt 5 of data.train is nan: check its "
        "weights and engine.dtype"
    )


def test_a_response_that_no_function_rewards_has_no_score_and_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    job = load_job(JOB, [f"output_dir={tmp_path}", f"reward.function={MODULE}:marked"])
    prompts = prompts_of(job)
    made, rollout = opened(job, prompts), sampled_texts(prompts, [5], ["#### 1", "none"])
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            found = made.scores(rollout, None).scores
            assert found[0] == 1.0 and math.isnan(found[1])
    (record,) = caplog.records
    assert record.getMessage() == (
        "reward: no score for 1 of 2 completions, first of all 'none' "
        f"(prompt {prompts.text(5)!r}): these have an advantage of 0; let one function apply "
        "(logged once)"
    )


@pytest.mark.parametrize("names", [["right"], ["right", "short"]])
def test_metrics_are_of_each_of_several_functions_and_of_what_they_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, names: list[str]
) -> None:
    """One function alone has no metrics of its own: they are those of the scores."""
    monkeypatch.setattr(rewards, "sum_on_host", lambda table: table)
    monkeypatch.setattr(rewards, "gather_everywhere", lambda logged: [logged, {}])
    (data := tmp_path / "a.jsonl").write_text('{"prompt": "1 + 2?", "response": "#### 3"}\n')
    functions = ", ".join(f"{MODULE}:{name}" for name in names)
    source = ("data.format=auto", f"data.train={data}", "data.max_length=99")
    job = load_job(JOB, [f"output_dir={tmp_path}", *source, f"reward.function=[{functions}]"])
    prompts = prompts_of(job)
    made, rollout = opened(job, prompts), sampled_texts(prompts, [0], ["3", "4"], 5)
    found = made.scores(rollout, None)
    if len(names) > 1:
        found.metrics["rewards/right/mean"] = [9.0]  # logged, but the name is taken
    metrics = made.metrics(rollout, found)
    assert metrics.pop("accuracy") == 0.5
    if len(names) == 1:
        assert metrics == {}
        return
    assert metrics.pop("rewards/right/mean") == 0.5
    assert metrics.pop("rewards/right/std") == pytest.approx(math.sqrt(0.5))
    lengths = [-0.5 * 2, -0.5 * 1]  # half of the iterations are done
    assert metrics.pop("rewards/Short/mean") == pytest.approx(np.mean(lengths))
    assert metrics.pop("rewards/Short/std") == pytest.approx(np.std(lengths, ddof=1))
    assert metrics == {}


def test_a_rank_s_rewards_stand_in_its_samples_places(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This rank owns the second of two samples, another one the first."""
    others = torch.tensor([[1.0, 4.0], [0.0, 0.0]], dtype=torch.float64)
    monkeypatch.setattr(rewards, "sum_on_host", lambda table: table + others)
    monkeypatch.setattr(rewards, "gather_everywhere", lambda logged: [logged, {}])
    functions = f"[{MODULE}:marked, {MODULE}:short]"
    job = load_job(JOB, [f"output_dir={tmp_path}", f"reward.function={functions}"])
    prompts = prompts_of(job)
    rollout = sampled_texts(prompts, [5], ["a", "b"])
    rollout = replace(rollout, sampled={1: rollout.sampled[1]})
    found = Rewarded(np.array([5.0]), np.array([[0.5, 8.0]]))
    metrics = opened(job, prompts).metrics(rollout, found)
    assert metrics["rewards/marked/mean"] == pytest.approx(0.75)
    assert metrics["rewards/marked/std"] == pytest.approx(0.5 / math.sqrt(2))
    assert metrics["rewards/Short/std"] == pytest.approx(4.0 / math.sqrt(2))


def test_functions_may_log_one_metric_together(tmp_path: Path) -> None:
    """In the mean over all that is logged, each counts."""
    functions = [f"tests.unit.test_response_rewards:{name}" for name in ("logs_two", "logs_five")]
    job = load_job(JOB, [f"output_dir={tmp_path}", f"reward.function=[{', '.join(functions)}]"])
    found = rewarded(job, prompts_of(job), [5], ["a", "b"])
    assert found.metrics == {"seen": [2.0, 5.0]}


def test_a_rank_without_responses_calls_no_function(tmp_path: Path) -> None:
    job = load_job(JOB, [f"output_dir={tmp_path}"])
    prompts = prompts_of(job)
    signatures = in_process([load_reward_function(name) for name in job.reward.functions])
    made = Rewards(job, prompts, ByteTokenizer(), 10, Functions(signatures.signatures, None))
    rollout = replace(sampled_texts(prompts, [5], ["a", "b"]), sampled={})
    assert made.scores(rollout, None).by_function.shape == (0, 1)


def logs_two(completions: list[str], log_metric: Callable, **_: Any) -> list[float]:
    log_metric("seen", 2.0)
    return [0.0] * len(completions)


def logs_five(completions: list[str], log_metric: Callable, **_: Any) -> list[float]:
    log_metric("seen", 5.0)
    return [0.0] * len(completions)


KEPT = "tests.unit.test_response_rewards:keep"
SEEN: dict[str, Any] = {}


def keep(**kwargs: Any) -> list[float]:
    """Note what a function is given."""
    SEEN.clear()
    SEEN.update(kwargs)
    return [0.0] * len(kwargs["completions"])


def test_messages_come_as_messages_and_text_as_text(tmp_path: Path) -> None:
    messages = [{"role": "system", "content": "Be brief"}, {"role": "user", "content": "Sky?"}]
    rows = [{"prompt": messages, "answer": "blue"}, {"prompt": "Sea?", "answer": "green"}]
    data = tmp_path / "a.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = ("data.format=auto", f"data.train={data}", "data.max_length=99")
    job = load_job(JOB, [f"output_dir={tmp_path}", *source, f"reward.function={KEPT}"])
    for _ in range(2):  # tokenized, then from the cache
        rewarded(job, prompts_of(job), [1, 0], ["a", "b", "c", "d"], iteration=4)
        assert SEEN["prompts"] == ["Sea?", "Sea?", messages, messages]
        answers = [[{"role": "assistant", "content": text}] for text in "cd"]
        assert SEEN["completions"] == ["a", "b", *answers]
        assert SEEN["completion_ids"] == [[97, STOP], [98, STOP], [99, STOP], [100]]
        assert SEEN["answer"] == ["green", "green", "blue", "blue"]
        state = SEEN["trainer_state"]
        assert (state.global_step, state.max_steps) == (4, 10)
        assert state.epoch == 2 * 4 * job.global_batch_size / 2  # two batches an iteration
        assert callable(SEEN["log_extra"]) and callable(SEEN["log_metric"])
