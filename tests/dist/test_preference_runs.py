"""Preference runs on two ranks: losses, references and their tables, packing, skipped steps.

Runs share one spawn, and those on damaged tables another; every loss is a list over steps.
"""

import logging
import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from puzzle_align.commands.prepare import pack_data
from puzzle_align.config.job import JobConfig
from puzzle_align.config.load import load_job
from puzzle_align.layout.job_plan import ContextPlan
from puzzle_align.runtime.groups.collectives import barrier
from puzzle_align.runtime.groups.world import World
from puzzle_align.stages import models as opened_models
from puzzle_align.stages.dpo import DPOTrainer
from puzzle_align.stages.preference import reference_table
from puzzle_align.stages.weights import Weights
from puzzle_align.telemetry.preference_metrics import TOKEN_NAMES
from tests.checkpoints import flip
from tests.dist.spawn import asked, marked, run_ranks
from tests.jobs import parallel, resolved

NUM_STEPS = 3
JOB = """
global_batch_size: 8
engine: {device: cpu}
actor:
  model:
    config:
      {model_type: llama, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2,
       num_attention_heads: 4, num_key_value_heads: 2, vocab_size: 260,
       max_position_embeddings: 64}
data: {format: synthetic, num_synthetic: 48, eval_fraction: 0.25, max_length: 64}
packing: {row_tokens: 64}
optimizer: {lr: 0.01, warmup_steps: 2}
telemetry: {progress: false}
"""
# Policy = reference: the argument of every loss is 0, beta is 0.1.
FIRST_LOSS = {
    "sigmoid": math.log(2),
    "ipo": (1 / (2 * 0.1)) ** 2,
    "hinge": 1.0,
    "robust": math.log(2),
    "sigmoid_norm": math.log(2),
    "exo_pair": -math.log(2) - 0.5 * math.log(0.1 * 0.9),
    "nca_pair": 2 * math.log(2),
    "bco_pair": 2 * math.log(2),
    "sppo_hard": 2 * (1 / (2 * 0.1)) ** 2,
    "discopop": (math.log(2) + 1) / 2,
    "sft": None,
    "aot": math.log(2),
    "aot_unpaired": math.log(2),
    "[sigmoid, bco_pair]": 3 * math.log(2),
    "apo_zero": 1.0,
    "apo_down": 1.0,
    "simpo": None,
    "orpo": None,
    "plackett_luce": math.log(2),
}
P2, D2, T2 = {"P": 2}, {"D": 2}, {"T": 2}


def _job(folder: Path, *overrides: str) -> JobConfig:
    return load_job(JOB, [f"output_dir={folder}/out", *overrides])


class Runs:
    """Short runs on this rank, by name."""

    def __init__(self, world: World, folder: Path) -> None:
        self.world, self.folder = world, folder
        self.first: dict[str, dict[str, float]] = {}  # metrics of the first step
        self.losses: dict[str, list[float]] = {}
        self.norms: dict[str, list[float]] = {}
        self.evals: dict[str, dict[str, float]] = {}
        self.seconds_before: dict[str, float] = {}
        self.flops: dict[str, float] = {}  # of the first step

    def trainer(self, *overrides: str) -> DPOTrainer:
        job = _job(self.folder, *overrides)
        return DPOTrainer(resolved(job, self.world.size), self.world)

    def run(self, name: str, *overrides: str, steps: int = NUM_STEPS) -> None:
        trainer = self.trainer(f"max_steps={NUM_STEPS}", *overrides)
        assert {*trainer.models} == {"actor"}  # no reference that follows the policy
        metrics, stats = zip(*map(trainer.train_step, range(steps)), strict=True)
        self.first[name], self.flops[name] = metrics[0], stats[0].num_flops
        self.losses[name] = [step["loss"] for step in metrics]
        self.norms[name] = [step["grad_norm"] for step in metrics]
        self.evals[name] = trainer.evaluate() or {}
        self.seconds_before[name] = trainer.seconds_before


# Another model than the policy: no ratio is 0, and their order no accident of rounding.
OTHER_REFERENCE = (
    "reference.model.config={model_type: llama, hidden_size: 32, intermediate_size: 64,"
    " num_hidden_layers: 2, num_attention_heads: 4, num_key_value_heads: 2, vocab_size: 260,"
    " max_position_embeddings: 64, initializer_range: 0.3}",
)
# What needs more than the sums of a pair, trained alike under every plan.
DETAILED = {
    "LD-DPO": ("dpo.loss_type=[sigmoid, sft]", "dpo.ld_alpha=0.5"),
    "AOT": ("dpo.loss_type=[aot, aot_unpaired]", "dpo.beta=1.5", *OTHER_REFERENCE),
    "AOT, reference free": ("dpo.loss_type=aot", "dpo.reference_free=true"),
    "WPO": ("dpo.use_weighting=true",),
    "TRL's ORPO": ("dpo.loss_type=orpo", "dpo.nll_scope=sequence"),
    "TRL's CPO": ("dpo.loss_type=simpo", "dpo.sft_loss_weight=0.5", "dpo.nll_scope=batch"),
}


# What trains as the job itself, and its keys.
PLANS = {
    "actor P2": parallel("actor", **P2),
    "actor T2": parallel("actor", **T2),
    "reference P2": [*parallel("actor", **D2), *parallel("reference", **P2)],
    "reference T2": [*parallel("actor", **D2), *parallel("reference", **T2)],
    "actor P2, reference D2": [*parallel("actor", **P2), *parallel("reference", **D2)],
    "sharded optimizer": ["optimizer.use_distributed_optimizer=true"],
    "padded": ["packing.enabled=false"],
    "paired": ["packing.layout=paired"],
    "paired, padded": ["packing.layout=paired", "packing.enabled=false"],
}
DETAILED_PLANS = {
    "T2": [*parallel("actor", **T2), "packing.layout=paired"],
    "P2": [*parallel("actor", **P2), "packing.enabled=false"],
}
# Others have each part of them; tests/unit has the losses' values, and the damages of caches.
SLOW = {
    *("ipo", "hinge", "robust", "sigmoid_norm", "nca_pair", "sppo_hard", "discopop", "sft"),
    *("aot", "aot_unpaired", "apo_zero", "apo_down", "simpo", "orpo", "plackett_luce"),
    *("padded", "paired", "reference P2", "reference T2"),
    *(("LD-DPO", "P2"), ("WPO", "P2"), ("AOT", "T2"), ("TRL's ORPO", "T2"), ("TRL's CPO", "T2")),
    *(("AOT, reference free", plan) for plan in DETAILED_PLANS),
    *(("scaled", "two nodes"), ("cut", "one node")),
    *((how, n) for how in ("flipped", "not described", "gone") for n in ("one node", "two nodes")),
}


def _all_runs(
    rank: int, world_size: int, folder: str, losses: set[str], names: set[str], pairs: set[Any]
) -> dict[str, Any]:
    """What tests need of all runs, and the runs of losses, names, and names and plans."""
    runs = Runs(World(rank, world_size, torch.device("cpu")), Path(folder))
    runs.run("live")
    for loss in sorted({"sigmoid"} | losses):
        flipped = 0.1 if loss == "exo_pair" else 0
        runs.run(f"loss {loss}", f"dpo.loss_type={loss}", f"dpo.label_smoothing={flipped}", steps=2)
    runs.run("without token metrics", "telemetry.token_metrics=false")
    runs.run("reference free", "dpo.reference_free=true", steps=2)
    for name in sorted(names & DETAILED.keys()):
        runs.run(name, *DETAILED[name], steps=2)
    for name, plan in sorted(pairs):
        runs.run(f"{name}, {plan}", *DETAILED[name], *DETAILED_PLANS[plan], steps=2)
    for name in sorted(names & PLANS.keys()):
        runs.run(name, *PLANS[name])
    _dataset_scope(runs)
    return {
        "first": runs.first,
        "losses": runs.losses,
        "norms": runs.norms,
        "flops": runs.flops,
        "evals": runs.evals,
        "tables": _tables(runs),
        "skips": [_skipped(runs, *parallel("actor", **sizes)) for sizes in (D2, P2)],
    }


def _dataset_scope(runs: Runs) -> None:
    """Packed once over everything: by the loader, and offline."""
    runs.run("dataset scope", "packing.scope=dataset", "data.eval_fraction=0")
    path = runs.folder / "packed"
    if runs.world.rank == 0:
        pack_data(_job(runs.folder), path)
    barrier()
    runs.run("packed files", "data.format=packed", f"data.train={path}", "data.eval_fraction=0")


@contextmanager
def _opened() -> Iterator[list[str]]:
    """The roles whose models are opened meanwhile."""
    roles: list[str] = []
    open_context = reference_table.open_context

    def recorded(weights: Weights, context: ContextPlan, *arguments: Any) -> Any:
        roles.append(context.role)
        return open_context(weights, context, *arguments)

    reference_table.open_context = opened_models.open_context = recorded
    try:
        yield roles
    finally:
        reference_table.open_context = opened_models.open_context = open_context


def _tables(runs: Runs) -> dict[str, Any]:
    """Two runs with precomputed log-probabilities, the second from disk, and one of LD-DPO."""
    found: dict[str, Any] = {"files": [], "built": [], "seconds": []}
    for number in range(2):
        with _opened() as roles:
            runs.run(f"table {number}", "dpo.precompute_ref_log_probs=true")
        found["seconds"].append(runs.seconds_before[f"table {number}"])
        files = sorted((runs.folder / "out" / "cache").glob("ref_log_probs/*/log_probs.bin"))
        found["files"].append([(file.parent.name, file.stat().st_mtime_ns) for file in files])
        found["built"].append(roles)
        barrier()
    with _opened() as roles:  # whose sums have other weights
        runs.trainer("dpo.precompute_ref_log_probs=true", "dpo.ld_alpha=0.5")
    found["built for LD-DPO"] = roles
    barrier()
    return found


def _skipped(runs: Runs, *overrides: str) -> tuple[int, bool, bool]:
    """A run whose second step has one infinite gradient, on rank 1."""
    trainer = runs.trainer("max_steps=3", *overrides)
    reduce = trainer.optimizer.reduce_gradients

    def poisoned() -> None:
        if runs.world.rank == 1:
            parameter = next(trainer.policy.chunks[0].parameters())
            parameter.main_grad.view(-1)[0] = math.inf
        reduce()

    def weights() -> list[torch.Tensor]:
        return [p.detach().clone() for p in trainer.policy.chunks[0].parameters()]

    trainer.train_step(0)
    before = weights()
    trainer.optimizer.reduce_gradients = poisoned
    metrics, _ = trainer.train_step(1)
    trainer.optimizer.reduce_gradients = reduce
    assert math.isfinite(metrics["loss"]) and not math.isfinite(metrics["grad_norm"])
    kept = all(map(torch.equal, before, weights()))
    trainer.train_step(2)
    moved = not all(map(torch.equal, before, weights()))
    return trainer.num_skipped, kept, moved


@pytest.fixture(scope="module")
def ranks(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> list[dict[str, Any]]:
    folder = str(tmp_path_factory.mktemp("runs"))
    losses, names = asked(request, "loss"), asked(request, "name")
    return run_ranks(_all_runs, 2, folder, losses, names, asked(request, "name", "plan"))


@pytest.fixture(scope="module")
def losses(ranks) -> dict[str, list[float]]:
    assert ranks[0]["losses"] == ranks[1]["losses"]  # every rank tells the same
    return ranks[0]["losses"]


@pytest.mark.parametrize("loss", marked(FIRST_LOSS, SLOW))
def test_every_loss_trains_from_its_value_at_the_reference(losses, ranks, loss: str) -> None:
    values = losses[f"loss {loss}"]
    assert all(map(math.isfinite, values)) and values[0] != values[1]
    assert all(norm > 0 for norm in ranks[0]["norms"][f"loss {loss}"])
    if FIRST_LOSS[loss] is not None:  # of a difference that is 0 bitwise: its own rounding
        assert values[0] == pytest.approx(FIRST_LOSS[loss], abs=1e-6)


@pytest.mark.parametrize("name", ["live", "actor P2", "actor T2"])
def test_a_policy_that_equals_its_reference_equals_it_bitwise(ranks, name: str) -> None:
    """Under one plan: every margin is 0, and every pair neither right nor wrong."""
    first = ranks[0]["first"][name]
    assert first["rewards/accuracies"] == 0.5 and first["rewards/margins"] == 0
    assert first["rewards/chosen"] == 0 and first["loss"] == math.log(2)


def test_reference_free_is_not_the_reference(losses) -> None:
    assert losses["reference free"][0] != pytest.approx(math.log(2), abs=1e-6)


@pytest.mark.parametrize("name", marked(("loss sigmoid", *PLANS), SLOW))
def test_plans_references_and_layouts_train_alike(losses, ranks, name: str) -> None:
    # 1e-6 of losses below 1: tenfold what float32 gives after two steps, and DESIGN's 1e-5 is more.
    steps = len(losses[name])
    assert losses[name] == pytest.approx(losses["live"][:steps], abs=1e-6)
    norms = ranks[0]["norms"]
    assert norms[name] == pytest.approx(norms["live"][:steps], rel=1e-4)
    if steps == NUM_STEPS:
        for metric, value in ranks[0]["evals"]["live"].items():
            assert ranks[0]["evals"][name][metric] == pytest.approx(value, abs=1e-5), metric


@pytest.mark.parametrize(("name", "plan"), marked(product(DETAILED, DETAILED_PLANS), SLOW))
def test_losses_of_tokens_are_the_same_under_every_plan(losses, ranks, name, plan) -> None:
    here, there = name, f"{name}, {plan}"
    assert losses[there] == pytest.approx(losses[here], rel=1e-6, abs=1e-6)
    assert losses[here][0] != pytest.approx(losses["live"][0], abs=1e-3)
    norms, evals = ranks[0]["norms"], ranks[0]["evals"]
    assert norms[there] == pytest.approx(norms[here], rel=1e-4)
    for metric, value in evals[here].items():
        assert evals[there][metric] == pytest.approx(value, rel=1e-5, abs=1e-5), metric


@pytest.mark.parametrize(
    ("name", "passes"),
    [
        ("live", 1 + 1 + 2),  # the reference's forward, and the policy's with its backward
        ("table 0", 1 + 2),
        ("reference free", 1 + 2),
        ("AOT", 1 + 1 + 1 + 2),  # once more, to sort by
    ],
)
def test_flops_are_of_all_passes(ranks, name: str, passes: int) -> None:
    flops = ranks[0]["flops"]
    assert flops[name] * 4 == flops["live"] * passes


def test_token_metrics_cost_no_bit_of_the_loss(losses, ranks) -> None:
    assert losses["without token metrics"] == losses["live"]
    evals = ranks[0]["evals"]
    assert evals["live"].keys() - evals["without token metrics"].keys() == set(TOKEN_NAMES)


def test_rows_packed_offline_are_those_of_dataset_scope(losses) -> None:
    assert losses["packed files"] == losses["dataset scope"]
    assert losses["dataset scope"][0] == pytest.approx(math.log(2), abs=1e-6)


def test_a_table_has_the_live_reference_s_values(losses) -> None:
    """Within rounding: its rows hold the pairs in the data's order, the live ones in an epoch's."""
    assert losses["table 0"] == losses["table 1"]
    assert losses["table 0"] == pytest.approx(losses["live"], abs=1e-6)  # as in the test above


def test_a_second_run_finds_the_tables(ranks) -> None:
    for rank in ranks:
        first, second = rank["tables"]["files"]
        assert len(first) == 2  # training and held-out pairs
        assert first == second
        assert rank["tables"]["built"] == [["reference", "actor"], ["actor"]]
        assert rank["tables"]["built for LD-DPO"] == ["reference", "actor"]
        computed, found = rank["tables"]["seconds"]
        assert computed > found == 0.0


def test_a_step_with_an_infinite_gradient_is_skipped_and_counted(ranks) -> None:
    for rank in ranks:
        assert rank["skips"] == [(1, True, True)] * 2


DAMAGES: dict[str, Callable[[Path], object]] = {
    "none": lambda _: None,
    "scaled": lambda file: (1.5 * np.fromfile(file)).tofile(file),
    "cut": lambda file: os.truncate(file, 100),
    "flipped": lambda file: flip(file, file.stat().st_size // 2),
    "not described": lambda file: (file.parent / "meta.json").write_text("{}"),
    "gone": Path.unlink,
}


def _run_after(world: World, folder: Path, damage: str, does_it: bool) -> Any:
    """Losses, what was built, what the cache told and the table, on a rank, after a damage."""
    if does_it:
        for file in (folder / "out" / "cache").glob("ref_log_probs/*/log_probs.bin"):
            DAMAGES[damage](file)
    barrier()
    warnings: list[str] = []
    handler, cache_log = logging.Handler(), logging.getLogger("puzzle_align.data.cache")
    handler.emit = lambda record: warnings.append(record.getMessage())
    keys = ("max_steps=2", "data.num_synthetic=16", "data.eval_fraction=0")
    cache_log.addHandler(handler)
    with _opened() as built:
        trainer = Runs(world, folder).trainer("dpo.precompute_ref_log_probs=true", *keys)
    cache_log.removeHandler(handler)
    losses = [trainer.train_step(step)[0]["loss"] for step in range(2)]
    (file,) = (folder / "out" / "cache").glob("ref_log_probs/*/log_probs.bin")
    table = np.fromfile(file).tolist()
    barrier()  # a rank that goes on damages it
    return losses, built, warnings, table


def _damaged_runs(
    rank: int, world_size: int, folder: str, pairs: set[tuple[str, str]]
) -> dict[tuple[str, str], Any]:
    world = World(rank, world_size, torch.device("cpu"))
    runs = {}
    for nodes, own, first in (("one node", "one", 0), ("two nodes", f"node{rank}", 1)):
        for damage in DAMAGES:
            if damage == "none" or (damage, nodes) in pairs:
                place = Path(folder) / own
                runs[nodes, damage] = _run_after(world, place, damage, rank == first)
        os.environ["LOCAL_RANK"] = "0"
    return runs


@pytest.fixture(scope="module")
def damaged(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> list[dict[tuple[str, str], Any]]:
    pairs = asked(request, "damage", "nodes")
    return run_ranks(_damaged_runs, 2, str(tmp_path_factory.mktemp("tables")), pairs)


@pytest.mark.parametrize(
    ("damage", "nodes"),
    marked(product([*DAMAGES][1:], ("one node", "two nodes")), SLOW),
)
def test_a_damaged_table_is_reported_and_computed_anew(damaged, nodes, damage) -> None:
    whole = damaged[0]["one node", "none"]
    for rank, runs in enumerate(damaged):
        losses, built, warnings, table = runs[nodes, damage]
        assert losses == whole[0] and table == whole[3]
        assert built == ["reference", "actor"]
        is_first = rank == (0 if nodes == "one node" else 1)
        assert len(warnings) == is_first
        assert all("is damaged (" in line and "made anew" in line for line in warnings)
