"""convert: transformers reads what training wrote, and nothing is lost either way."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from puzzle_align.commands import convert
from puzzle_align.config.saved import find_latest
from puzzle_align.layout.hf_config import from_hf_config
from puzzle_align.layout.rows import RowLayout, Segment
from puzzle_align.models.attention import prepare_attention
from puzzle_align.runtime.checkpoint.models import Trained, load_checkpoint
from puzzle_align.runtime.groups.world import init_distributed, shutdown_distributed
from tests.dist.resumed_run import Case, job, run
from tests.dist.spawn import run_alone, run_ranks
from tests.dist.test_checkpoint import plan
from tests.e2e.conftest import Command
from tests.e2e.launch import ROOT, python_path
from tests.specs import CONFIG

TIED = Case("interleaved_tied", plan(2, 1, chunks=2), tied=True)
BF16 = Case("tensor_bf16", plan(1, 2), dtype="bf16", distributed_optimizer=True)
UNEVEN = Case("uneven", plan(2, 1, layers=[1, 3]))
TOKENS = 16


def _train(rank: int, world_size: int, folder: Path) -> None:
    for case in (TIED, BF16, UNEVEN):
        run(case, job(case, folder, case.name), rank, world_size)


def _convert(folder: Path) -> None:
    """There, back and there again; and the logits that the trained weights give here."""
    for case in (TIED, BF16, UNEVEN):
        trained, work = folder / case.name, folder / f"{case.name}_converted"
        convert.to_hf(trained, work / "hf")
        (work / "hf/tokenizer.json").write_text("{}")
        convert.to_checkpoint(work / "hf", work / "checkpoint")
        convert.to_hf(work / "checkpoint", work / "again")
        torch.save(_logits(trained / "checkpoints"), work / "logits.pt")


def _logits(folder: Path) -> tuple[torch.Tensor, torch.Tensor]:
    saved = find_latest(folder)
    assert saved is not None
    world = init_distributed("cpu", 60.0)
    about = saved.metadata("actor")
    spec = from_hf_config(about["model"], "")
    context = convert._build("actor", spec, about["dtype"], world)
    load_checkpoint(saved, {"actor": Trained(context, None)})
    row = RowLayout(TOKENS, (Segment(0, TOKENS // 2, (TOKENS // 2,)),))
    chunk = context.chunks[0]
    chunk.row_state.current = prepare_attention(row, "dense", world.device)
    tokens = torch.randint(0, context.spec.vocab_size, (1, TOKENS))
    with torch.no_grad():
        logits = chunk(tokens, torch.arange(TOKENS)[None])[..., : context.spec.vocab_size]
    shutdown_distributed()
    return tokens, logits


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    run_ranks(_train, 2, folder)
    run_alone(_convert, folder)
    return folder


@pytest.mark.parametrize("case", [TIED, BF16, UNEVEN], ids=lambda case: case.name)
def test_there_and_back_is_bitwise(folder: Path, case: Case) -> None:
    work = folder / f"{case.name}_converted"
    first, second = (
        {path.name: path.read_bytes() for path in (work / name).iterdir()}
        for name in ("hf", "again")
    )
    assert set(first) == {"config.json", "model.safetensors", "tokenizer.json"}
    assert first == second
    saved = find_latest(work / "checkpoint")
    assert saved is not None
    about = saved.metadata("actor")
    assert (saved.step, about["dtype"], about["has_optimizer"]) == (0, case.dtype, False)


# Relative to the largest logit. In bf16 each of some thirty results in a row is rounded by up to
# 2**-8, here as in transformers: 2e-2 was seen whatever the kernel.
@pytest.mark.parametrize(("case", "tolerance"), [(TIED, 1e-5), (BF16, 5e-2), (UNEVEN, 1e-5)])
def test_transformers_computes_the_same(folder: Path, case: Case, tolerance: float) -> None:
    work = folder / f"{case.name}_converted"
    model = AutoModelForCausalLM.from_pretrained(work / "hf")
    assert model.dtype is {"fp32": torch.float32, "bf16": torch.bfloat16}[case.dtype]
    assert bool(model.config.tie_word_embeddings) is case.tied
    tokens, logits = torch.load(work / "logits.pt")
    with torch.no_grad():
        theirs = model(tokens).logits
    assert logits.abs().max() > 0.5
    assert (logits - theirs).abs().max() <= tolerance * logits.abs().max()


def test_the_command(folder: Path, tmp_path: Path, command: Command) -> None:
    source, out = folder / TIED.name / "checkpoints", tmp_path / "out"
    asked = ["convert", str(source), str(out)]
    environment = {**os.environ, "PYTHONPATH": python_path()}
    first = subprocess.run(
        [sys.executable, "-m", "puzzle_align.cli.main", *asked],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert first.returncode == 0, first.stderr
    expected = folder / f"{TIED.name}_converted/hf/model.safetensors"
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
    source, out = folder / TIED.name / "checkpoints", tmp_path / "out"
    out.mkdir()
    tokenizer = tmp_path / "tokenizer.json"
    tokenizer.symlink_to("/dev/null/gone")
    with monkeypatch.context() as patched:
        patched.setattr(convert, "_tokenizer_files", lambda _: [tokenizer])
        code, _, errors = command("convert", str(source), str(out))
    assert code == 2
    assert errors[-1].startswith(f"error: {out} cannot be written (Not a directory): free space")
    assert not list(out.iterdir())
    assert command("convert", str(source), str(out))[0] == 0


def test_a_model_that_the_files_do_not_hold_is_not_built(tmp_path: Path) -> None:
    huge = {**CONFIG, "hidden_size": 2**17, "intermediate_size": 2**19, "head_dim": 64}
    (tmp_path / "config.json").write_text(json.dumps(huge))
    save_file({"model.embed_tokens.weight": torch.zeros(4)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"has shape \(4,\), config.json asks for \(260, 131072\)"):
        convert.to_checkpoint(tmp_path, tmp_path / "out")


def test_what_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no checkpoint there"):
        convert.to_hf(tmp_path, tmp_path / "out")
    (tmp_path / "step_00000003").mkdir()
    with pytest.raises(ValueError, match="job.json is missing"):
        convert.to_hf(tmp_path, tmp_path / "out")
