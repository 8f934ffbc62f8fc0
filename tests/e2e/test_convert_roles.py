"""convert of a checkpoint of several models: each for transformers, named by its role."""

from dataclasses import asdict
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from puzzle_align.cli import convert as command
from puzzle_align.commands import convert
from puzzle_align.config.job import JobConfig
from puzzle_align.config.sections.models import ModelConfig, RoleConfig
from puzzle_align.models.hf.weights import export_hf
from puzzle_align.runtime.checkpoint.models import save_checkpoint
from puzzle_align.runtime.groups.world import init_distributed, shutdown_distributed
from tests.dist.several_models import SPECS, Place, build
from tests.dist.spawn import run_alone

PLACES = {"actor": Place((0,)), "critic": Place((0,))}


def _convert(folder: Path) -> None:
    """What was saved, straight from the models; and as convert writes it."""
    tokenizer = folder / "tokenizer"
    tokenizer.mkdir()
    (tokenizer / "tokenizer.json").write_text("{}")
    job = JobConfig(stage="ppo", actor=RoleConfig(model=ModelConfig(path=str(tokenizer))))
    models = build(PLACES, init_distributed("cpu", 60.0), seed=1)
    save_checkpoint(folder / "checkpoints", 7, {"config": asdict(job)}, models)
    for role, model in models.items():
        export_hf(model.context.chunks, SPECS[role], folder / "expected" / role, "fp32")
    shutdown_distributed()
    command.main([str(folder), str(folder / "actor")])
    command.main([str(folder), str(folder / "critic"), "--role", "critic"])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("roles")
    run_alone(_convert, folder)
    return folder


@pytest.mark.parametrize("role", PLACES)
def test_every_model_is_exported_bitwise_with_the_tokenizer(folder: Path, role: str) -> None:
    written, expected = (
        {path.name: path.read_bytes() for path in (folder / at).iterdir()}
        for at in (role, f"expected/{role}")
    )
    assert written == {**expected, "tokenizer.json": b"{}"}


def test_transformers_loads_each_as_what_it_is(folder: Path) -> None:
    actor = AutoModelForCausalLM.from_pretrained(folder / "actor")
    assert actor.config.architectures == ["Qwen2ForCausalLM"]
    critic, found = AutoModelForSequenceClassification.from_pretrained(
        folder / "critic", output_loading_info=True
    )
    assert critic.config.num_labels == 1
    assert not found["missing_keys"]


def test_an_unknown_role_is_one_line(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no reward: name one of actor, critic"):
        convert.to_hf(folder, tmp_path / "out", "reward")
    with pytest.raises(SystemExit):
        command.main(["--to-checkpoint", "--role", "actor", str(folder), str(tmp_path / "out")])
