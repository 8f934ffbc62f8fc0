"""Reward functions written for TRL's GRPOTrainer on GSM8K's columns, unchanged in stage grpo.

The model prefers digits, so that some of its completions are right. All rewards are computed here
once more, by hand, from the tokens that were sampled.
"""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from puzzle_align.config.job import JobConfig
from puzzle_align.config.load import load_job
from puzzle_align.data.tokenize import ByteTokenizer
from puzzle_align.runtime.groups.world import World
from puzzle_align.stages.grpo import open_trainer
from puzzle_align.stages.outlook import open_outlook
from tests.dist.spawn import run_ranks
from tests.jobs import problems_of, resolved

GSM8K = Path(__file__).parents[3] / "shared/data/gsm8k_test.jsonl"
NUM_STEPS, K = 3, 4
MODULE = "tests.dist.gsm8k_rewards"
JOB = f"""
stage: grpo
global_batch_size: 4
max_steps: {NUM_STEPS}
engine: {{device: cpu}}
tokenizer: {{path: byte}}
data: {{format: auto, columns: {{prompt: question}}, max_length: 512, shuffle: false}}
packing: {{row_tokens: 1024}}
generation: {{num_generations: {K}, max_new_tokens: 6}}
optimizer: {{lr: 0.001}}
telemetry: {{progress: false, tensorboard: false}}
"""
ROWS = [
    ("Tom has 3 apples and eats one. How many are left?", "3 - 1 = <<3-1=2>>2\n#### 2"),
    ("A box holds 12 eggs. Three people share them evenly. How many has each?", "12 / 3\n#### 4"),
    ("Ann buys 2 pens for $1 each and pays with $5. How much is her change?", "5 - 2\n#### 3"),
    ("What is half of 2?", "2 / 2 = <<2/2=1>>1\n#### 1"),
    ("Ben reads 100 pages a week. How many weeks do 400 pages take him?", "400 / 100\n#### 4"),
    ("How many legs have two birds?", "2 * 2 = <<2*2=4>>4\n#### 4"),
    ("A shop sells 1,200 cups in all, 600 a day. For how many days does it?", "1200/600\n#### 2"),
    ("How many are 2 and 1?", "2 + 1 = <<2+1=3>>3\n#### 3"),
]
NAMES = ("format_reward", "long_questions", "progress", "judge")
WEIGHTS = (1.0, 0.5, 0.25, 2.0, -0.125)


def _model(folder: Path) -> None:
    """A tiny random model that samples the digits 1 to 4, spaces and stops."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=260,
        max_position_embeddings=512,
        bos_token_id=257,
        eos_token_id=258,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        model.model.embed_tokens.weight[:, 0] = 1.0
        model.lm_head.weight[:, 0] = -1.0
        model.lm_head.weight[[*b"1234 ", 258], 0] = 1.0
    model.save_pretrained(folder / "model")


def _data(folder: Path) -> dict[str, tuple[list[str], list[str]]]:
    """Questions and answers by case, which is a file's name: texts, messages and real rows."""
    questions, answers = map(list, zip(*ROWS, strict=True))
    cases = {"text": (questions, answers), "messages": (questions, answers)}
    if GSM8K.is_file():
        rows = [json.loads(line) for line in GSM8K.open(encoding="utf-8")]
        short = [row for row in rows if len(row["query"].encode()) < 200][:8]
        cases["real"] = [row["query"] for row in short], [row["response"] for row in short]
    for name, (asked, given) in cases.items():
        with (folder / f"{name}.jsonl").open("w", encoding="utf-8") as file:
            for question, answer in zip(asked, given, strict=True):
                message = [{"role": "user", "content": question}]
                value = message if name == "messages" else question
                file.write(json.dumps({"question": value, "answer": answer}) + "\n")
    return cases


def functions_of(name: str) -> tuple[str, ...]:
    """Names of a case's functions."""
    return "correctness_of_messages" if name == "messages" else "correctness", *NAMES


def job_of(folder: Path, name: str) -> JobConfig:
    """A case's job."""
    functions = ", ".join(f"{MODULE}:{function}" for function in functions_of(name))
    return load_job(
        JOB,
        [
            *(f"output_dir={folder}/out", f"actor.model.path={folder}/model"),
            f"data.train={folder}/{name}.jsonl",
            *(f"reward.function=[{functions}]", f"reward.weights={[*WEIGHTS]}"),
        ],
    )


def number(answer: str) -> str:
    """The number of a GSM8K answer."""
    return answer.split("#### ")[1].replace(",", "")


def _runs(rank: int, world_size: int, folder: Path, names: list[str]) -> dict[str, Any]:
    """By case: of every iteration metrics, tokens by sample, and the logged samples."""
    world, runs = World(rank, world_size, torch.device("cpu")), {}
    for name in names:
        job = job_of(folder, name)
        assert not problems_of(job, world.size)
        trainer = open_trainer(resolved(job, world.size), world)
        sampled, generate = [], trainer.generate

        def recorded(*arguments: Any, generate: Any = generate) -> Any:
            rollouts = generate(*arguments)
            responses = rollouts[0].sampled.items()
            sampled.append({s: r.tokens.tolist() for s, r in responses})  # noqa: B023
            return rollouts

        trainer.generate = recorded  # type: ignore[method-assign]
        metrics, samples = [], []
        for step in range(NUM_STEPS):
            metrics.append(trainer.train_step(step)[0])
            samples.append([sample.extra for sample in trainer.samples()])
        runs[name] = metrics, sampled, samples
    return runs


def _by_hand(questions: list[str], answers: list[str], tokens: list[list[int]], step: int) -> Any:
    """Rewards of an iteration's samples by function, NaN where one does not apply: [n, 5]."""
    rewards = np.full((len(tokens), 5), np.nan)
    for sample, ids in enumerate(tokens):
        row = (4 * step + sample // K) % len(questions)
        text = bytes(ids).decode() if 258 not in ids else bytes(ids[:-1]).decode()
        numbers = re.findall(r"\d+", text)
        rewards[sample, 0] = numbers[-1:] == [number(answers[row])]
        rewards[sample, 1] = text[-1:].isdigit()
        if len(questions[row]) > 60:
            rewards[sample, 2] = len(text)
        rewards[sample, 3] = -len(ids) * step / NUM_STEPS
        if len(ids) % 2:
            rewards[sample, 4] = 0.5
    return rewards


Case = tuple[list[str], list[str], list[Any]]  # questions, answers, what each rank returned


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Case]:
    folder = tmp_path_factory.mktemp("trl")
    _model(folder)
    cases = _data(folder)
    ranks = run_ranks(_runs, 2, folder, [*cases])
    return {name: (*data, [rank[name] for rank in ranks]) for name, data in cases.items()}


no_file = pytest.mark.skipif(not GSM8K.is_file(), reason="the GSM8K file is not at hand")


@pytest.mark.parametrize("name", ["text", "messages", pytest.param("real", marks=no_file)])
def test_functions_written_for_trl_run_unchanged(runs: dict[str, Case], name: str) -> None:
    questions, answers, ((metrics, first, samples), (_, second, _)) = runs[name]
    num_right = 0
    for step, record in enumerate(metrics):
        sampled = first[step] | second[step]
        assert 0 < len(first[step]) < len(sampled) == 4 * K  # both ranks call the functions
        tokens = [sampled[sample] for sample in range(4 * K)]
        rewards = _by_hand(questions, answers, tokens, step)
        for function, values in zip(functions_of(name), rewards.T, strict=True):
            assert 0 < np.isfinite(values).sum() <= 4 * K
            mean, std = np.nanmean(values), np.nanstd(values, ddof=1)
            assert record[f"rewards/{function}/mean"] == pytest.approx(mean), (step, function)
            assert record[f"rewards/{function}/std"] == pytest.approx(std), (step, function)
        scores = np.nansum(rewards * WEIGHTS, axis=1)
        assert record["objective/scores"] == pytest.approx(scores.mean())
        assert record["reward_std"] == pytest.approx(scores.std(ddof=1))
        is_equal = np.ptp(scores.reshape(4, K), axis=1) == 0
        assert record["frac_reward_zero_std"] == is_equal.mean()
        assert record["num_tokens"] == pytest.approx(np.mean([len(ids) for ids in tokens]))
        rows = [(4 * step + prompt) % len(questions) for prompt in range(4)]
        assert samples[step] == [{"golden_answer": number(answers[row])} for row in rows]
        num_right += int(rewards[:, 0].sum())
    assert name == "real" or 0 < num_right < NUM_STEPS * 4 * K


def test_the_data_s_name_of_the_prompts_is_a_column_for_validate_too(tmp_path: Path) -> None:
    _data(tmp_path)
    problems: list[str] = []
    open_outlook(job_of(tmp_path, "text")).preview(None, ByteTokenizer(), problems)
    assert problems == []
