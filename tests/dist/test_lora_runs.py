"""DPO with adapters: where the reference is, how work is ordered, what is saved and exported."""

import shutil
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from puzzle_align.commands import convert
from puzzle_align.config.job import JobConfig
from puzzle_align.config.load import load_job
from puzzle_align.config.saved import find_latest
from puzzle_align.layout.weights import is_base, num_trainable_parameters
from puzzle_align.runtime.checkpoint.reader import stored
from puzzle_align.runtime.groups.world import World
from puzzle_align.stages.dpo import DPOTrainer
from puzzle_align.stages.weights import find_starts
from puzzle_align.telemetry import StepStats
from tests.dist.spawn import asked, marked, run_alone, run_ranks
from tests.jobs import parallel, resolved, run_to_end

JOB = """
global_batch_size: 8
max_steps: 4
engine: {device: cpu}
actor:
  model: {path: BASE}
  lora: {r: 4, lora_alpha: 16, use_rslora: true}
tokenizer: {path: byte}
data: {format: synthetic, num_synthetic: 48, eval_fraction: 0.25, max_length: 64}
packing: {row_tokens: 64}
optimizer: {lr: 0.01, warmup_steps: 2}
telemetry: {progress: false, tensorboard: false}
checkpoint: {save_every: 4}
"""
P2, D2, T2 = (parallel("actor", **{axis: 2}) for axis in "PDT")
SEQUENTIAL, SHARED = ("placement.reference=sequential",), ("placement.reference=time_shared",)
OWN = ("reference.model.path=BASE",)
RUNS = {  # each of a group has the same numbers, to the bit
    "P2, sequential": (*P2, *SEQUENTIAL),
    "P2, in the bubbles": (*P2, *SHARED),
    "P2, a reference of its own": (*P2, *OWN, *SHARED),
    "D2": D2,
    "D2, a reference of its own": (*D2, *OWN),
    "T2, recompute": (*T2, "actor.parallel.recompute=full"),
    "T2, a reference of its own": (*T2, *OWN, *parallel("reference", T=2)),
}
GROUPS = {"P2": "P2, sequential", "D2": "D2", "T2": "T2, recompute"}  # the first of each
# A reference of its own is in the pipeline's runs; tensor ranks are in those of TRL and of PPO.
SLOW = ("D2, a reference of its own", "T2, recompute", "T2, a reference of its own")
NAMES = marked(RUNS, SLOW)


def save_base(folder: Path) -> None:
    """Save a Llama of random weights in ``folder / "base"``."""
    config = transformers.LlamaConfig(
        vocab_size=260,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        initializer_range=0.2,
    )
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(folder / "base")


class Watched(DPOTrainer):
    """Keeps its steps' losses."""

    losses: list[float]

    def train_step(self, step: int) -> tuple[dict[str, float], StepStats]:
        metrics, stats = super().train_step(step)
        self.losses.append(metrics["loss"])
        return metrics, stats


def _config(folder: Path, name: str, overrides: tuple[str, ...]) -> JobConfig:
    base = str(folder / "base")
    text = JOB.replace("BASE", base)
    given = [override.replace("BASE", base) for override in overrides]
    return load_job(text, [*given, f"output_dir={folder / name}"])


def _on_ranks(rank: int, world_size: int, folder: Path, names: list[str]) -> dict[str, Any]:
    found = {}
    for name in names:
        overrides = RUNS[name]
        world = World(rank, world_size, torch.device("cpu"))
        job = resolved(_config(folder, name, overrides), world_size)
        trainer = Watched(job, world)
        trainer.losses = []
        shares = _shares_base(trainer)
        run_to_end(trainer, find_starts(job))
        found[name] = trainer.losses, shares
    return found


def _shares_base(trainer: DPOTrainer) -> bool:
    """Whether the reference has its base, and only that, in the actor's memory."""
    places: dict[str, set[tuple[bool, int]]] = {}
    contexts = trainer.run.contexts
    for context in (contexts["actor", "train"], contexts["reference", "infer"]):
        places[context.role] = {
            (is_base(context.spec, name), value.data_ptr())
            for chunk in context.chunks
            for name, value in chunk.named_parameters()
        }
    actor, reference = places["actor"], places["reference"]
    return {place for place in reference if place[0]} == actor & reference


@pytest.fixture(scope="module")
def runs(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("lora")
    save_base(folder)
    asked_for = asked(request, "name")
    names = {GROUPS["P2"], GROUPS["D2"], *asked_for, *(GROUPS[name[:2]] for name in asked_for)}
    return folder, run_ranks(_on_ranks, 2, folder, sorted(names))[1]


@pytest.mark.parametrize("name", NAMES)
def test_the_reference_is_the_base_wherever_it_runs(runs, name: str) -> None:
    _, found = runs
    losses, shares = found[name]
    assert shares == ("its own" not in name)
    assert losses == found[GROUPS[name[:2]]][0]
    assert losses[0] == pytest.approx(0.6931472, abs=1e-6)
    assert losses[-1] < 0.69


@pytest.mark.parametrize("name", marked(("D2", "T2, recompute"), SLOW))
def test_plans_agree(runs, name: str) -> None:
    """Those of a group do so bitwise, as the test above shows."""
    _, found = runs
    assert found[name][0] == pytest.approx(found["P2, sequential"][0], rel=1e-5)


def test_a_checkpoint_has_the_adapters_and_not_the_base(runs) -> None:
    folder, _ = runs
    saved = find_latest(folder / "D2/checkpoints")
    assert saved is not None
    spec = resolved(_config(folder, "D2", tuple(D2)), 2).models["actor"].spec
    assert saved.metadata("actor")["lora"] == spec.lora
    stored_sizes = {
        key: prod(tensor.size)
        for key, tensor in stored(saved).state_dict_metadata.items()
        if isinstance(tensor, TensorStorageMetadata)
    }
    print(stored_sizes)
    assert all(".lora." in key for key in stored_sizes)
    assert sum(stored_sizes.values()) == 3 * num_trainable_parameters(spec)  # and two moments


@pytest.mark.slow
@pytest.mark.parametrize("name", ["T2, recompute"])
def test_peft_and_transformers_read_what_convert_writes(runs, name: str) -> None:
    peft = pytest.importorskip("peft")
    folder, _ = runs
    tokens = torch.randint(0, 256, (2, 24), generator=torch.Generator().manual_seed(1))
    outputs = []
    for source in ("P2, sequential", name):
        for merge in (False, True):
            out = folder / f"{source} {merge}"
            run_alone(_convert, folder / source, out, merge)
            if merge:
                model = transformers.AutoModelForCausalLM.from_pretrained(out)
            else:
                model = transformers.AutoModelForCausalLM.from_pretrained(folder / "base")
                plain = model(tokens).logits
                model = peft.PeftModel.from_pretrained(model, str(out))
            with torch.no_grad():
                outputs.append(model(tokens).logits)
    for logits in outputs[1:]:
        torch.testing.assert_close(logits, outputs[0], rtol=0, atol=1e-4)
    assert (outputs[0] - plain).abs().max() > 0.1


def _convert(checkpoint: Path, out: Path, merge: bool) -> None:
    convert.to_hf(checkpoint, out, merge=merge)


def test_training_goes_on_from_a_peft_directory(runs) -> None:
    """Its first loss is log 2: the reference has a frozen copy of these adapters."""
    folder, _ = runs
    out = folder / "exported"
    run_alone(_convert, folder / "P2, sequential", out, False)
    losses = run_ranks(_from_adapters, 2, folder, out)[1]
    assert losses[0] == pytest.approx(0.6931472, abs=1e-6)


def _from_adapters(rank: int, world_size: int, folder: Path, out: Path) -> list[float]:
    config = _config(folder, "again", (*D2, f"actor.lora.path={out}", "max_steps=1"))
    world = World(rank, world_size, torch.device("cpu"))
    trainer = Watched(resolved(config, world_size), world)
    trainer.losses = []
    assert _shares_base(trainer)
    run_to_end(trainer)
    return trainer.losses


def test_another_base_is_refused(runs, tmp_path: Path) -> None:
    folder, _ = runs
    weights = folder / "base/model.safetensors"
    shutil.move(weights, tmp_path / "kept")
    try:
        other = transformers.LlamaConfig.from_pretrained(folder / "base")
        torch.manual_seed(1)
        transformers.LlamaForCausalLM(other).save_pretrained(folder / "base")
        with pytest.raises(RuntimeError, match="other weights than the adapters"):
            run_alone(_convert, folder / "D2", tmp_path / "out", True)
        with pytest.raises(RuntimeError, match="other weights"):
            run_ranks(_on, 2, folder, "D2")
    finally:
        shutil.move(tmp_path / "kept", weights)


def _on(rank: int, world_size: int, folder: Path, name: str) -> None:
    """Start a job again that has a checkpoint."""
    config = _config(folder, name, tuple(D2))
    world = World(rank, world_size, torch.device("cpu"))
    job = resolved(config, world_size)
    run_to_end(DPOTrainer(job, world), find_starts(job))
