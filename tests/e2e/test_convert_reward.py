"""convert of reward models: transformers gives the scores that the trained weights give here."""

import logging
from pathlib import Path

import pytest
import torch
import transformers
from transformers import AutoModelForSequenceClassification

from puzzle_align.commands import convert
from puzzle_align.config.job import JobConfig
from puzzle_align.config.load import load_job
from puzzle_align.config.saved import find_latest
from puzzle_align.layout.families import FAMILIES
from puzzle_align.layout.hf_config import from_hf_config
from puzzle_align.layout.model import with_scalar_head
from puzzle_align.layout.rows import RowLayout, Segment
from puzzle_align.models.attention import prepare_attention
from puzzle_align.runtime.checkpoint.models import Trained, load_checkpoint
from puzzle_align.runtime.groups.world import World, init_distributed, shutdown_distributed
from puzzle_align.stages.reward import RewardTrainer
from puzzle_align.stages.run import train
from tests.dist.spawn import run_alone, run_ranks
from tests.jobs import resolved

PAD, END = 256, 258
JOB = """
stage: reward
global_batch_size: 8
max_steps: 2
engine: {device: cpu}
reward:
  model:
    config:
      {model_type: qwen3, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2,
       head_dim: 16, num_attention_heads: 4, num_key_value_heads: 2, vocab_size: 260,
       tie_word_embeddings: true, max_position_embeddings: 64, initializer_range: 0.3,
       eos_token_id: 258, pad_token_id: 256}
tokenizer: {path: byte}
data: {format: synthetic, num_synthetic: 32, max_length: 64}
packing: {row_tokens: 128}
optimizer: {lr: 0.01}
telemetry: {progress: false, tensorboard: false}
"""
PARALLEL = "reward.parallel"
RUNS = {
    "fp32": [f"{PARALLEL}.tensor_model_parallel_size=2", f"{PARALLEL}.sequence_parallel=true"],
    "bf16": [f"{PARALLEL}.pipeline_model_parallel_size=2", "engine.dtype=bf16"],
}
# Relative to the largest score. In bf16 each of some twenty results in a row is rounded by up to
# 2**-8, here as in transformers: 3e-2 was seen whatever the kernel.
TOLERANCE = {"fp32": 1e-4, "bf16": 5e-2}
LENGTHS = (12, 30, 21)


def _job(folder: Path, name: str) -> JobConfig:
    own = [f"output_dir={folder / name}", f"data.cache_dir={folder}/cache"]
    return load_job(JOB, [*own, *RUNS[name]])


def _train(rank: int, world_size: int, folder: Path) -> None:
    world = World(rank, world_size, torch.device("cpu"))
    for name in RUNS:
        job = _job(folder, name)
        train(RewardTrainer(resolved(job, world.size), world), {})


def _texts() -> list[torch.Tensor]:
    """Tokens of some sequences, each with its end."""
    torch.manual_seed(1)
    bodies = [torch.randint(0, 256, (length - 1,)) for length in LENGTHS]
    return [torch.cat((body, torch.tensor([END]))) for body in bodies]


def _convert(folder: Path) -> None:
    """There, back and there again; and the scores that the trained weights give here."""
    for name in RUNS:
        work = folder / f"{name}_converted"
        convert.to_hf(folder / name, work / "hf")
        convert.to_checkpoint(work / "hf", work / "checkpoint")
        convert.to_hf(work / "checkpoint", work / "again")
        torch.save(_scores(folder / name / "checkpoints"), work / "scores.pt")


def _scores(checkpoints: Path) -> torch.Tensor:
    saved = find_latest(checkpoints)
    assert saved is not None
    world = init_distributed("cpu", 60.0)
    about = saved.metadata("reward")
    spec = from_hf_config(about["model"], "")
    context = convert._build("reward", spec, about["dtype"], world)
    load_checkpoint(saved, {"reward": Trained(context, None)})
    chunk, scores = context.chunks[0], []
    for tokens in _texts():
        length = len(tokens)
        row = RowLayout(length, (Segment(0, length - 5, (5,)),))
        chunk.row_state.current = prepare_attention(row, "dense", world.device)
        with torch.no_grad():
            scores.append(chunk(tokens[None], torch.arange(length)[None])[-1])
    shutdown_distributed()
    return torch.stack(scores)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    run_ranks(_train, 2, folder)
    run_alone(_convert, folder)
    return folder


@pytest.mark.parametrize("name", RUNS)
def test_transformers_gives_the_same_scores(folder: Path, name: str) -> None:
    work = folder / f"{name}_converted"
    model = AutoModelForSequenceClassification.from_pretrained(work / "hf").eval()
    assert (type(model).__name__, model.config.num_labels) == ("Qwen3ForSequenceClassification", 1)
    expected = torch.load(work / "scores.pt")
    scale = expected.abs().max()
    assert expected.std() > 0.01
    padded = torch.nn.utils.rnn.pad_sequence(_texts(), batch_first=True, padding_value=PAD)
    with torch.no_grad():
        alone = torch.stack([model(tokens[None]).logits[0, 0] for tokens in _texts()])
        together = model(padded, attention_mask=(padded != PAD).long()).logits[:, 0]
    for theirs in (alone, together):
        error = (theirs.float() - expected).abs().max() / scale
        print(f"{name}: {error:.1e} of {scale:.2f}")
        assert error <= TOLERANCE[name]


@pytest.mark.parametrize("name", RUNS)
def test_there_and_back_is_bitwise(folder: Path, name: str) -> None:
    work = folder / f"{name}_converted"
    first, second = (
        {path.name: path.read_bytes() for path in (work / kind).iterdir()}
        for kind in ("hf", "again")
    )
    assert set(first) == {"config.json", "model.safetensors"}
    assert first == second
    saved = find_latest(work / "checkpoint")
    assert saved is not None
    assert (saved.job["config"]["stage"], saved.metadata("reward")["dtype"]) == ("reward", name)
    assert saved.job["config"]["reward"]["model"]["path"] == str((work / "hf").resolve())


@pytest.mark.parametrize(
    ("ids", "words"),
    [
        ({"pad_token_id": 1, "eos_token_id": [2, 3]}, None),
        ({"pad_token_id": 3, "eos_token_id": [2, 3]}, "pad_token_id=3 also ends a text"),
        ({"eos_token_id": 2}, "no pad_token_id in config.json"),
        (
            {"model_type": "granite", "pad_token_id": 1, "eos_token_id": 2},
            "transformers has no GraniteForSequenceClassification: only puzzle-align can load",
        ),
    ],
)
def test_where_transformers_scores_otherwise_is_told(
    ids: dict, words: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    config = _job(Path("x"), "fp32").reward.model.config
    assert config is not None
    special = {"pad_token_id": None, "eos_token_id": None, **ids}
    with caplog.at_level(logging.WARNING):
        convert._warn_of_scores(with_scalar_head(from_hf_config({**config, **special}, "x")))
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == (words is not None)
    assert words is None or words in told[0]


def test_the_families_whose_classifier_transformers_lacks_are_known() -> None:
    for family in FAMILIES.values():
        name = f"{family.architecture}ForSequenceClassification"
        assert family.has_classifier == hasattr(transformers, name), name
