"""convert: transformers reads what training wrote, and nothing is lost either way.

Policies, reward models, and a checkpoint of several models: each for transformers, by its role.
"""

import json
import logging
import os
import shutil
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from puzzle_align.cli import convert as convert_command
from puzzle_align.commands import convert
from puzzle_align.config.job import JobConfig
from puzzle_align.config.load import load_job
from puzzle_align.config.saved import Saved, find_checkpoint, find_latest
from puzzle_align.config.sections.models import ModelConfig, RoleConfig
from puzzle_align.config.sections.output import CheckpointConfig
from puzzle_align.layout.families import FAMILIES
from puzzle_align.layout.hf_config import from_hf_config
from puzzle_align.layout.model import with_scalar_head
from puzzle_align.layout.plan import ParallelPlan
from puzzle_align.layout.rows import RowLayout, Segment
from puzzle_align.models.attention import prepare_attention
from puzzle_align.models.chunk import ModelChunk
from puzzle_align.models.hf.weights import export_hf
from puzzle_align.models.inputs import Predictions
from puzzle_align.runtime.checkpoint.models import Trained, load_checkpoint, save_checkpoint
from puzzle_align.runtime.groups.world import World, init_distributed, shutdown_distributed
from puzzle_align.stages.reward import RewardTrainer
from tests.checkpoints import change_job
from tests.dist.random_models import random_context
from tests.dist.resumed_run import Case, job, run
from tests.dist.several_models import SPECS, Place, build
from tests.dist.spawn import run_alone, run_ranks
from tests.dist.test_checkpoint import plan
from tests.e2e.conftest import Command
from tests.e2e.launch import ROOT, python_path
from tests.jobs import resolved, run_to_end
from tests.refusals import closed, refusal
from tests.specs import CONFIG

CASES = {
    case.name: case
    for case in (
        Case("interleaved_tied", plan(2, 1, chunks=2), tied=True),
        Case("tensor_bf16", plan(1, 2), dtype="bf16", distributed_optimizer=True),
        Case("uneven", plan(2, 1, layers=[1, 3])),
    )
}
TIED = "interleaved_tied"
PAD, END = 256, 258
REWARD_JOB = """
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
REWARDS = {
    "reward_fp32": [
        "reward.parallel.tensor_model_parallel_size=2",
        "reward.parallel.sequence_parallel=true",
    ],
    "reward_bf16": ["reward.parallel.pipeline_model_parallel_size=2", "engine.dtype=bf16"],
}
LENGTHS = (12, 30, 21)
# Relative to the largest logit or score. In bf16 each of some thirty results in a row is rounded by
# up to 2**-8, here as in transformers: 3e-2 was seen whatever the kernel.
LOGIT_TOLERANCE = {TIED: 1e-5, "tensor_bf16": 4e-2, "uneven": 1e-5}
SCORE_TOLERANCE = {"reward_fp32": 1e-4, "reward_bf16": 5e-2}
PLACES = {"actor": Place((0,)), "critic": Place((0,))}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def _reward_job(folder: Path, name: str) -> JobConfig:
    own = [f"output_dir={folder / name}", f"data.cache_dir={folder}/cache"]
    return load_job(REWARD_JOB, [*own, *REWARDS[name]])


def _train(rank: int, world_size: int, folder: Path) -> None:
    for name, case in CASES.items():
        config, only_last = job(case, folder, name), CheckpointConfig(save_every=0)
        run(case, replace(config, max_steps=3, checkpoint=only_last), rank, world_size)
    world = World(rank, world_size, torch.device("cpu"))
    for name in REWARDS:
        run_to_end(RewardTrainer(resolved(_reward_job(folder, name), world.size), world))


def _texts(*lengths: int) -> list[torch.Tensor]:
    """Tokens of some sequences, each with its end."""
    torch.manual_seed(1)
    bodies = [torch.randint(0, 256, (length - 1,)) for length in lengths]
    return [torch.cat((body, torch.tensor([END]))) for body in bodies]


def _convert(folder: Path) -> None:
    """There, back and there again; and the numbers that the trained weights give here."""
    for name in (*CASES, *REWARDS):
        trained, work = folder / name, folder / f"{name}_converted"
        convert.to_hf(trained, work / "hf")
        if name in CASES:
            (work / "hf/tokenizer.json").write_text("{}")
        convert.to_checkpoint(work / "hf", work / "checkpoint")
        convert.to_hf(work / "checkpoint", work / "again")
        torch.save(_numbers(_latest(trained / "checkpoints")), work / "numbers.pt")


def _latest(checkpoints: Path) -> Saved:
    saved = find_latest(checkpoints)
    assert saved is not None
    return saved


def _numbers(saved: Saved) -> list[torch.Tensor]:
    """A policy's logits of one text's tokens, or a reward model's scores of several."""
    world, role = init_distributed("cpu", 60.0), saved.main_role
    about = saved.metadata(role)
    spec = from_hf_config(about["model"], "")
    context = random_context(spec, ParallelPlan(), world, role=role, seed=1, dtype=about["dtype"])
    load_checkpoint(saved, {role: Trained(context, None)})
    outputs = [_forward(context.chunks[0], tokens) for tokens in _texts(*LENGTHS)]
    shutdown_distributed()
    if role == "reward":
        return [scores[-1] for scores in outputs]
    return [logits[:, : spec.vocab_size] for logits in outputs]


def _forward(chunk: ModelChunk, tokens: torch.Tensor) -> torch.Tensor:
    length = len(tokens)
    row = RowLayout(length, (Segment(0, length - 5, (5,)),))
    chunk.row_state.current = prepare_attention(row, "dense", torch.device("cpu"))
    with torch.no_grad():
        places = torch.arange(length)
        return chunk(tokens[None], places[None], Predictions(places, None))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    run_ranks(_train, 2, folder)
    run_alone(_convert, folder)
    return folder


def _files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("name", [*CASES, *REWARDS])
def test_there_and_back_is_bitwise(folder: Path, name: str) -> None:
    work = folder / f"{name}_converted"
    first, second = _files(work / "hf"), _files(work / "again")
    is_policy = name in CASES
    tokenizer = {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}
    assert set(first) == {"config.json", "model.safetensors", *tokenizer}
    assert first == second
    saved = _latest(work / "checkpoint")
    about = saved.metadata("actor" if is_policy else "reward")
    dtype = "bf16" if "bf16" in name else "fp32"
    assert (saved.step, about["dtype"], about["has_optimizer"]) == (0, dtype, False)
    if not is_policy:
        assert saved.job["config"]["stage"] == "reward"
        assert saved.job["config"]["reward"]["model"]["path"] == str((work / "hf").resolve())


@pytest.mark.parametrize("name", CASES)
def test_transformers_computes_the_same(folder: Path, name: str) -> None:
    work = folder / f"{name}_converted"
    model = AutoModelForCausalLM.from_pretrained(work / "hf")
    assert model.dtype is DTYPES[CASES[name].dtype]
    assert bool(model.config.tie_word_embeddings) is CASES[name].tied
    model.float()  # of the same weights: beside another bf16 model, errors of both would add up
    for tokens, logits in zip(_texts(*LENGTHS), torch.load(work / "numbers.pt"), strict=True):
        with torch.no_grad():
            theirs = model(tokens[None]).logits[0]
        assert logits.abs().max() > 0.5
        assert (logits - theirs).abs().max() <= LOGIT_TOLERANCE[name] * logits.abs().max()


@pytest.mark.parametrize("name", REWARDS)
def test_transformers_gives_the_same_scores(folder: Path, name: str) -> None:
    work = folder / f"{name}_converted"
    model = AutoModelForSequenceClassification.from_pretrained(work / "hf").eval()
    assert (type(model).__name__, model.config.num_labels) == ("Qwen3ForSequenceClassification", 1)
    expected, texts = torch.stack(torch.load(work / "numbers.pt")), _texts(*LENGTHS)
    scale = expected.abs().max()
    assert expected.std() > 0.01
    padded = torch.nn.utils.rnn.pad_sequence(texts, batch_first=True, padding_value=PAD)
    with torch.no_grad():
        alone = torch.stack([model(tokens[None]).logits[0, 0] for tokens in texts])
        together = model(padded, attention_mask=(padded != PAD).long()).logits[:, 0]
    for theirs in (alone, together):
        assert (theirs.float() - expected).abs().max() / scale <= SCORE_TOLERANCE[name]


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
def test_where_transformers_scores_otherwise_is_reported(
    ids: dict, words: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    config = _reward_job(Path("x"), "reward_fp32").reward.model.config
    assert config is not None
    special = {"pad_token_id": None, "eos_token_id": None, **ids}
    with caplog.at_level(logging.WARNING):
        convert._warn_of_scores(with_scalar_head(from_hf_config({**config, **special}, "x")))
    warnings = [record.getMessage() for record in caplog.records]
    assert len(warnings) == (words is not None)
    assert words is None or words in warnings[0]


def test_the_families_whose_classifier_transformers_lacks_are_known() -> None:
    for family in FAMILIES.values():
        name = f"{family.architecture}ForSequenceClassification"
        assert family.has_classifier == hasattr(transformers, name), name


def _in_a_new_process(*arguments: str) -> int:
    """The command line's exit code, after imports of its own."""
    words = [sys.executable, "-m", "puzzle_align.cli.main", *arguments]
    environment = {**os.environ, "PYTHONPATH": python_path()}
    return subprocess.run(words, cwd=ROOT, env=environment).returncode


@pytest.mark.parametrize("new", [False, pytest.param(True, marks=pytest.mark.slow)])  # imports
def test_the_command(folder: Path, tmp_path: Path, command: Command, new: bool) -> None:
    source, out = folder / TIED / "checkpoints", tmp_path / "out"
    asked = ["convert", str(source), str(out)]
    assert (_in_a_new_process(*asked) if new else command(*asked)[0]) == 0
    written = sorted(out.iterdir(), key=lambda path: path.stat().st_mtime_ns)
    assert written[-1].name == "config.json"  # if the command is killed before, it is no model
    expected = folder / f"{TIED}_converted/hf/model.safetensors"
    assert (out / "model.safetensors").read_bytes() == expected.read_bytes()
    code, _, errors = command(*asked)
    assert code == 2
    assert errors[-1].endswith("give a new directory, or clear it")
    code, _, errors = command("convert", str(source), "/dev/null/out")
    assert code == 2
    assert errors[-1].startswith("error: /dev/null/out cannot be written (Not a directory): free")


def test_what_cannot_be_written_whole_leaves_nothing(
    folder: Path, tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that the same command can run again, as its error says."""
    source, out = folder / TIED / "checkpoints", tmp_path / "out"
    out.mkdir()
    tokenizer = tmp_path / "tokenizer.json"
    tokenizer.symlink_to("/dev/null/gone")
    with monkeypatch.context() as patched:
        patched.setattr(convert, "_write_tokenizer", lambda _, to: shutil.copy(tokenizer, to))
        code, _, errors = command("convert", str(source), str(out))
    assert code == 2
    assert errors[-1].startswith(f"error: {out} cannot be written (Not a directory): free space")
    assert not list(out.iterdir())
    assert command("convert", str(source), str(out))[0] == 0


def test_a_model_that_the_files_do_not_hold_is_not_built(tmp_path: Path) -> None:
    huge = {**CONFIG, "hidden_size": 2**17, "intermediate_size": 2**19, "head_dim": 64}
    (tmp_path / "config.json").write_text(json.dumps(huge))
    save_file({"model.embed_tokens.weight": torch.zeros(4)}, tmp_path / "model.safetensors")
    line = refusal(lambda: convert.to_checkpoint(tmp_path, tmp_path / "out"))
    assert "has shape (4,), config.json asks for (260, 131072)" in line


def test_what_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    out = tmp_path / "out"
    line = refusal(lambda: convert.to_hf(tmp_path / "step_00000003", out))
    assert line == f"{tmp_path}/step_00000003: no such directory; give a checkpoint's"
    assert "no checkpoint there" in refusal(lambda: convert.to_hf(tmp_path, out))
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text("{}")
    line = refusal(lambda: convert.to_hf(tmp_path / "hf", out))
    assert line.endswith("a Hugging Face model; --to-checkpoint converts it")
    (tmp_path / "step_00000003").mkdir()
    assert "checksums.json is missing" in refusal(lambda: convert.to_hf(tmp_path, out))


def _convert_roles(folder: Path) -> None:
    """Write the models straight from the checkpoint, and as convert writes them."""
    tokenizer = folder / "tokenizer"
    tokenizer.mkdir()
    (tokenizer / "tokenizer.json").write_text("{}")
    (tokenizer / "additional_chat_templates").mkdir()
    (tokenizer / "additional_chat_templates/tools.jinja").write_text("a template")
    job = JobConfig(stage="ppo", actor=RoleConfig(model=ModelConfig(path=str(tokenizer))))
    models = build(PLACES, init_distributed("cpu", 60.0), seed=1)
    save_checkpoint(folder / "checkpoints", 7, {"config": asdict(job)}, models)
    for role, model in models.items():
        export_hf(model.context.chunks, SPECS[role], folder / "expected" / role, "fp32")
    shutdown_distributed()
    convert_command.main([str(folder), str(folder / "actor")])
    convert_command.main([str(folder), str(folder / "critic"), "--role", "critic"])


@pytest.fixture(scope="module")
def roles(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("roles")
    run_alone(_convert_roles, folder)
    return folder


@pytest.mark.parametrize("role", PLACES)
def test_every_model_is_exported_bitwise_with_the_tokenizer(roles: Path, role: str) -> None:
    tokenizer = {"tokenizer.json": b"{}", "tools.jinja": b"a template"}
    assert _files(roles / role) == {**_files(roles / "expected" / role), **tokenizer}


def test_a_tokenizer_that_is_gone_is_said(
    roles: Path, tmp_path: Path, alone: None, caplog: pytest.LogCaptureFixture
) -> None:
    moved = (roles / "tokenizer").rename(roles / "moved")
    try:
        convert.to_hf(roles, tmp_path / "out")
    finally:
        moved.rename(roles / "tokenizer")
    assert "tokenizer.json" not in _files(tmp_path / "out")
    (line,) = (record.getMessage() for record in caplog.records if "tokenizer" in record.msg)
    assert line == f"no tokenizer at tokenizer.path={roles}/tokenizer: none is written"


def test_a_chat_template_of_the_job_is_the_only_one(roles: Path, tmp_path: Path) -> None:
    """transformers would take the tokenizer's own for records with tools."""
    folder = shutil.copytree(_latest(roles / "checkpoints").path, tmp_path / "step_00000007")
    change_job(folder, lambda job: job["config"]["tokenizer"].update(chat_template="{{ 1 }}"))
    out = tmp_path / "out"
    out.mkdir()
    convert._write_tokenizer(find_checkpoint(folder), out)
    assert _files(out) == {"tokenizer.json": b"{}", "chat_template.jinja": b"{{ 1 }}"}


def test_transformers_loads_each_as_what_it_is(roles: Path) -> None:
    actor = AutoModelForCausalLM.from_pretrained(roles / "actor")
    assert actor.config.architectures == ["Qwen2ForCausalLM"]
    critic, found = AutoModelForSequenceClassification.from_pretrained(
        roles / "critic", output_loading_info=True
    )
    assert critic.config.num_labels == 1
    assert not found["missing_keys"]


def test_an_unknown_role_is_one_line(
    roles: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = refusal(lambda: convert.to_hf(roles, tmp_path / "out", "reward"))
    assert line.endswith("holds no reward: name one of actor, critic")
    for option in (["--role", "actor"], ["--merge"]):
        with pytest.raises(SystemExit):
            convert_command.main(["--to-checkpoint", *option, str(roles), str(tmp_path / "out")])
        assert "not for --to-checkpoint" in capsys.readouterr().err


def test_closed_folders_are_one_line(tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    with closed(theirs):
        for call in (
            lambda: convert.to_hf(theirs, tmp_path / "out"),
            lambda: convert.to_hf(theirs / "run", tmp_path / "out"),
            lambda: convert._check_free(theirs),
        ):
            assert refusal(call).startswith(f"{theirs}") and "Permission denied" in refusal(call)


def test_a_closed_tokenizer_is_not_taken_for_a_full_disk(roles: Path, tmp_path: Path) -> None:
    saved = find_checkpoint(roles)
    with closed(roles / "tokenizer"):
        line = refusal(lambda: convert._write_tokenizer(saved, tmp_path))
    assert line.startswith(f"tokenizer.path: {roles}/tokenizer cannot be read (")
