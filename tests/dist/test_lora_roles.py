"""PPO whose four roles have one base: against copies of it, in memory, and sampling elsewhere.

A reward model's adapters are trained in stage reward, exported, and given to PPO's reward model and
critic.
"""

from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import transformers

from puzzle_align.commands import convert
from puzzle_align.config.job import JobConfig
from puzzle_align.config.load import load_job
from puzzle_align.data.tokenize import ByteTokenizer
from puzzle_align.layout.weights import is_base, num_trainable_parameters
from puzzle_align.runtime import shadow
from puzzle_align.runtime.groups.world import World
from puzzle_align.stages import reward
from puzzle_align.stages.banner import job_memory, model_lines
from puzzle_align.stages.outlook import open_outlook
from puzzle_align.stages.weights import find_starts
from tests.dist.spawn import asked, run_alone, run_ranks
from tests.dist.test_lora_runs import Watched, save_base
from tests.dist.test_ppo_runs import assert_close
from tests.jobs import parallel, problems_of, resolved, run_to_end

COMMON = """
seed: 3
engine: {device: cpu}
tokenizer: {path: byte}
optimizer: {lr: 0.01, warmup_steps: 0}
telemetry: {progress: false, tensorboard: false}
packing: {row_tokens: 64}
"""
DPO = """
stage: dpo
global_batch_size: 8
max_steps: 4
data: {format: synthetic, num_synthetic: 32, eval_fraction: 0, max_length: 48}
checkpoint: {save_every: 4}
"""
KTO = """
stage: kto
global_batch_size: 8
max_steps: 2
data: {format: synthetic, num_synthetic: 32, eval_fraction: 0, max_length: 48}
"""
REWARD = """
stage: reward
global_batch_size: 8
max_steps: 3
data: {format: synthetic, num_synthetic: 32, eval_fraction: 0, max_length: 48}
"""
PPO = """
stage: ppo
global_batch_size: 4
max_steps: 2
data: {format: synthetic, num_synthetic: 32, max_length: 48}
generation: {max_new_tokens: 12, min_new_tokens: 2, decode_batch_size: 2}
ppo: {num_mini_batches: 2, kl_coef: 0.1}
"""
OF_REWARD = "{r: 4, lora_alpha: 16, path: REWARD}"
ONE_BASE = (
    "actor.model.path=BASE",
    "actor.lora={r: 4, lora_alpha: 16}",
    "reward.base=actor",
    f"reward.lora={OF_REWARD}",
)
COPIES = (
    *ONE_BASE[:2],
    "reference.model.path=BASE",
    "reward.model.path=BASE",
    f"reward.lora={OF_REWARD}",
    "critic.model.path=BASE",
    f"critic.lora={OF_REWARD}",
)
P2, D2, T2 = (tuple(parallel("actor", **{axis: 2})) for axis in "PDT")
ON_T2 = ("generation.parallel.tensor_model_parallel_size=2",)
RUNS = {
    "P2": (PPO, *ONE_BASE, *P2),
    "P2, copies": (PPO, *COPIES, *P2),
    "D2": (PPO, *ONE_BASE, *D2),
    "D2, copies": (PPO, *COPIES, *D2),
    "T2": (PPO, *ONE_BASE, *T2, "actor.parallel.sequence_parallel=true"),
    "P2, sampling on T2": (PPO, *ONE_BASE, *P2, *ON_T2),
    "P2, not merged": (PPO, *ONE_BASE, *P2, "actor.lora.merge=false"),
    "KTO": (KTO, *COPIES[:2], *P2),
    "KTO, copies": (KTO, *COPIES[:3], *P2),
}


class Ran(NamedTuple):
    """A run on a rank: metrics by iteration, bytes of weights, numbers sent by its switches."""

    metrics: list[dict[str, float]]
    weight_bytes: int
    predicted_bytes: int
    sent: list[int]


def job_of(folder: Path, text: str, name: str, *overrides: str) -> JobConfig:
    """The job in ``folder / name``, its paths filled in."""
    places = {"BASE": str(folder / "base"), "REWARD": str(folder / "reward_adapters")}
    given = list(overrides)
    for word, path in places.items():
        given = [override.replace(word, path) for override in given]
    return load_job(COMMON + text, [*given, f"output_dir={folder / name}"])


def _weights(trainer: Any) -> int:
    """Bytes of all weights of a rank, each storage once."""
    parameters = [
        parameter
        for context in {id(c): c for c in trainer.run.contexts.values()}.values()
        for chunk in context.chunks
        for parameter in chunk.parameters()
    ]
    return sum({p.data_ptr(): p.nbytes for p in parameters}.values())


def _run(rank: int, world_size: int, folder: Path, name: str) -> Ran:
    text, *overrides = RUNS[name]
    config = job_of(folder, text, name, *overrides)
    assert not problems_of(config, world_size)
    job, sent = resolved(config, world_size), []
    reshard = shadow.reshard

    def recorded(table: Any, *arguments: Any) -> None:
        sent.append(sum(table.sent.values()))
        reshard(table, *arguments)

    shadow.reshard = recorded
    try:
        open_trainer = import_module(f"puzzle_align.stages.{config.stage}").open_trainer
        trainer = open_trainer(job, World(rank, world_size, torch.device("cpu")))
        metrics = [trainer.train_step(step)[0] for step in range(trainer.num_steps)]
    finally:
        shadow.reshard = reshard
    preview = open_outlook(config).preview(job.plan, ByteTokenizer(), [])
    columns = [*job_memory(job, preview).values()]
    mine = columns[min(rank, len(columns) - 1)]
    predicted = sum(size for part, size in mine.items() if part.endswith("weights"))
    return Ran(metrics, _weights(trainer), predicted, sent)


def _runs(rank: int, world_size: int, folder: Path, names: list[str]) -> dict[str, Ran]:
    return {name: _run(rank, world_size, folder, name) for name in names}


def _train_reward(_rank: int, _world_size: int, folder: Path) -> None:
    config = job_of(
        folder, REWARD, "reward", "reward.model.path=BASE", "reward.lora={r: 4, lora_alpha: 16}"
    )
    job = resolved(config)
    run_to_end(reward.RewardTrainer(job, World(0, 1, torch.device("cpu"))), find_starts(job))


def _export(checkpoint: Path, out: Path) -> None:
    convert.to_hf(checkpoint, out)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a base, and adapters of a reward model on it."""
    made = tmp_path_factory.mktemp("roles")
    save_base(made)
    run_ranks(_train_reward, 1, made)
    run_alone(_export, made / "reward", made / "reward_adapters")
    return made


@pytest.fixture(scope="module")
def runs(folder: Path, request: pytest.FixtureRequest) -> list[dict[str, Ran]]:
    """Results of each rank: of the runs that all tests need, and of those asked for."""
    names = {"D2", "D2, copies", "P2, sampling on T2"} | asked(request, "name")
    names |= asked(request, "other")
    return run_ranks(_runs, 2, folder, [name for name in RUNS if name in names])


# D2 shows it, and sampling on T2 that pipeline ranks do the same.
SLOW_P2 = pytest.param("P2", "P2, copies", marks=pytest.mark.slow)


@pytest.mark.parametrize(("name", "other"), [SLOW_P2, ("D2", "D2, copies"), ("KTO", "KTO, copies")])
def test_one_base_trains_as_four_copies_to_the_bit(runs, name: str, other: str) -> None:
    for found in runs:
        assert found[name].metrics == found[other].metrics


def test_the_policy_leaves_the_base(runs) -> None:
    first = runs[0]["D2"].metrics
    assert abs(first[0]["objective/kl"]) < 1e-5 < 1e-3 < abs(first[1]["objective/kl"])
    assert abs(first[0]["objective/scores"]) > 1e-3


# Tensor ranks with adapters, and sums that are not merged, have tests of their own.
MORE = [pytest.param(name, marks=pytest.mark.slow) for name in ("P2", "T2", "P2, not merged")]


@pytest.mark.parametrize("name", ["P2, sampling on T2", *MORE])
def test_plans_agree(runs, name: str) -> None:
    found, expected = (runs[0][each].metrics for each in (name, "D2"))
    assert [step.keys() for step in found] == [step.keys() for step in expected]
    assert_close(found, expected)


def test_the_base_is_in_memory_once(runs) -> None:
    for found in runs:
        for name, ran in found.items():
            if "sampling" not in name:
                assert ran.weight_bytes == ran.predicted_bytes, name
        assert found["D2"].weight_bytes < 0.4 * found["D2, copies"].weight_bytes


def test_the_base_goes_to_another_plan_once(folder: Path, runs) -> None:
    spec = resolved(job_of(folder, PPO, "x", *ONE_BASE), 1).models["actor"].spec
    first, *later = runs[0]["P2, sampling on T2"].sent
    assert len(later) == 1 and 0 < later[0] <= num_trainable_parameters(spec)
    assert first > 5 * later[0]


def test_where_weights_are_is_said(folder: Path) -> None:
    apart = ("reward.parallel.tensor_model_parallel_size=2",)
    lines = [*model_lines(resolved(job_of(folder, PPO, "x", *ONE_BASE, *apart), 2))]
    told = {line.partition(":")[0]: line.rpartition("ranks 0 to 1, ")[2] for line in lines}
    assert told["actor"] == str(folder / "base")
    assert (
        told["reference"] == told["critic"] == "in the actor's memory, but for adapters and heads"
    )
    assert told["reward"] == f"{folder / 'base'}, in memory apart from the actor's"


def test_adapters_for_another_base_are_refused(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "base").mkdir()
    for file in (folder / "base").iterdir():
        (tmp_path / "base" / file.name).write_bytes(file.read_bytes())
    torch.manual_seed(1)
    config = transformers.LlamaConfig.from_pretrained(folder / "base")
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "base")
    job = resolved(job_of(folder, PPO, "x", *ONE_BASE, f"actor.model.path={tmp_path / 'base'}"), 1)
    with pytest.raises(RuntimeError, match="base has other weights than the adapters in"):
        run_ranks(_starts, 1, job)


def _starts(_rank: int, _world_size: int, job: Any) -> None:
    find_starts(job)


def test_a_frozen_reward_model_needs_a_trained_head(folder: Path) -> None:
    untrained = job_of(folder, PPO, "x", *ONE_BASE[:3])
    assert any("no trained reward head" in line for line in problems_of(untrained, 1))


def test_a_checkpoint_of_adapters_is_base_and_adapters(folder: Path) -> None:
    """DPO goes on from DPO's: the reference has the adapters that the policy starts from."""
    first, again = run_ranks(_dpo_twice, 2, folder)[1]
    assert again[0] == pytest.approx(0.6931472, abs=1e-6)
    assert first[0] == pytest.approx(0.6931472, abs=1e-6)
    assert first[-1] < 0.69
    path = f"actor.model.path={folder / 'dpo'}"
    for overrides, is_adapted in (((), True), (("reference.base=actor",), False)):
        models = resolved(job_of(folder, DPO, "x", path, *overrides), 1).models
        assert (models["reference"].spec.lora is not None) == is_adapted
        assert models["actor"].spec.lora is not None and models["actor"].path == f"{folder}/base"


def _dpo_twice(rank: int, world_size: int, folder: Path) -> list[list[float]]:
    """Losses of a run, and of one that starts from its checkpoint."""
    found = []
    starts = (ONE_BASE[:2], (f"actor.model.path={folder / 'dpo'}",))
    for number, (start, plan) in enumerate(zip(starts, (P2, D2), strict=True)):
        config = job_of(folder, DPO, f"dpo{number or ''}", *start, *plan)
        assert not problems_of(config, world_size)
        job = resolved(config, world_size)
        trainer = Watched(job, World(rank, world_size, torch.device("cpu")))
        trainer.losses = []
        contexts = trainer.run.contexts
        actor, reference = contexts["actor", "train"], contexts["reference", "infer"]
        places = {p.data_ptr() for chunk in actor.chunks for p in chunk.parameters()}
        for name, value in reference.chunks[0].named_parameters():
            assert (value.data_ptr() in places) == is_base(reference.spec, name)
        run_to_end(trainer, find_starts(job))
        found.append(trainer.losses)
    return found
