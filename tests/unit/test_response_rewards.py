"""Rewards of responses: the sum of model and function, and a model that gives no number."""

from pathlib import Path

import numpy as np
import pytest

from puzzle_align.config.load import load_job
from puzzle_align.data.tokenize import ByteTokenizer
from puzzle_align.runtime.generation import Response
from puzzle_align.stages.rl.rewards import Rewards
from puzzle_align.stages.rl.rollout import Rollout
from puzzle_align.stages.rl.setup import job_prompts

STOP = 258
JOB = """
stage: ppo
data: {format: synthetic, num_synthetic: 8, max_length: 32}
generation: {max_new_tokens: 8}
reward: {function: "puzzle_align.data.synthetic:vowel_share"}
"""


def _scores(folder: Path, rewards: list[float]) -> np.ndarray:
    """Of ``aab`` and a stop token, and of ``i`` cut off, both to the prompt in row 5."""
    job = load_job(JOB, [f"output_dir={folder}"])
    prompts = job_prompts(job, ByteTokenizer()).train
    sampled = {
        number: Response(number, np.array(ids), np.zeros(len(ids), np.float32), stopped)
        for number, (ids, stopped) in enumerate([([*b"aab", STOP], True), ([*b"i"], False)])
    }
    rollout = Rollout(
        iteration=0,
        prompts=np.array([5]),
        prompt_lengths=prompts.prompt_lengths[[5]].astype(np.int64),
        lengths=np.array([4, 1]),
        stopped=np.array([True, False]),
        owners=np.zeros(2, dtype=np.int64),
        num_generations=2,
    )
    return Rewards(job, prompts, ByteTokenizer()).scores(
        rollout,
        [0, 1],
        sampled,
        {sample: np.array([[reward]]) for sample, reward in enumerate(rewards)},
    )


def test_model_and_function_are_summed(tmp_path: Path) -> None:
    assert _scores(tmp_path, [0.5, -2.0]) == pytest.approx([0.5 + 2 / 3, -2.0 + 1.0])


def test_a_reward_model_that_gives_no_number_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError) as raised:
        _scores(tmp_path, [0.5, float("nan")])
    assert str(raised.value) == (
        "reward.model: its reward of response 1 to prompt 5 of data.train is nan: check its "
        "weights and engine.dtype"
    )
