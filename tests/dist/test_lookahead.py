"""Time-shared DPO computes, bit for bit, what sequential DPO does.

Every run goes through the training loop: evaluations between steps, a stop by signal, a resume.
Pairs are of uneven lengths and epochs do not divide into batches, so steps differ in their numbers
of microbatches and pairs. Models are tiny, and the reference is another model than the policy.
"""

import json
import random
import signal
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from puzzle_align.config.job import JobConfig
from puzzle_align.config.load import load_job
from puzzle_align.runtime import lookahead
from puzzle_align.runtime.executor import ModelRun
from puzzle_align.runtime.groups.world import World
from puzzle_align.schedules.actions import Action, Kind, Program
from puzzle_align.schedules.registry import schedule_for
from puzzle_align.stages.dpo import DPOTrainer
from puzzle_align.telemetry import StepStats
from tests.dist.resumed_run import state_hash
from tests.dist.spawn import asked, marked, run_ranks
from tests.jobs import parallel, resolved, run_to_end

STEPS, FEWER = 7, 4  # an epoch and a half, or almost one, with evaluations between
JOB = """
global_batch_size: 6
engine: {device: cpu}
actor:
  model:
    config: &model
      {model_type: llama, hidden_size: 16, intermediate_size: 32, num_hidden_layers: 2,
       num_attention_heads: 4, num_key_value_heads: 2, vocab_size: 260,
       max_position_embeddings: 64, initializer_range: 0.2}
reference:
  model:
    config: *model
data: {eval_fraction: 0.1, max_length: 64}
packing: {row_tokens: 64}
optimizer: {lr: 0.01, warmup_steps: 2}
telemetry: {progress: false, tensorboard: false, eval_every: 3}
"""


@dataclass(frozen=True)
class Case:
    """Sizes of both models' plan, number of steps, and what else is unusual."""

    name: str
    sizes: tuple[int, int, int]
    steps: int = STEPS
    overrides: tuple[str, ...] = ()

    @property
    def stopped(self) -> int:
        """Steps after which the time-shared run is stopped, to be resumed."""
        return self.steps // 3


CASES = {
    2: [
        Case("pipeline", (2, 1, 1)),
        Case(
            "interleaved",
            (2, 1, 1),
            FEWER,
            (
                "actor.parallel.virtual_pipeline_model_parallel_size=2",
                "actor.model.config.num_hidden_layers=4",
            ),
        ),
        # Three layers and two, beside the reference's two and two.
        Case("uneven", (2, 1, 1), FEWER, ("actor.model.config.num_hidden_layers=5",)),
        # Into the second epoch: but for the first one's last, each batch has as many rows.
        Case(
            "padded",
            (2, 1, 1),
            6,
            ("packing.enabled=false", "actor.parallel.pipeline_schedule=gpipe"),
        ),
        # Masks go on where they were, though a resumed run is cold again.
        Case("dropout", (2, 1, 1), FEWER, ("actor.lora.r=4", "actor.lora.lora_dropout=0.5")),
        Case("paired", (2, 1, 1), 6, ("packing.layout=paired", "packing.row_tokens=128")),
    ],
    4: [
        Case("data", (2, 2, 1), FEWER, ("optimizer.overlap_grad_reduce=true",)),
        Case("sharded", (2, 2, 1), FEWER, ("optimizer.use_distributed_optimizer=true",)),
        Case("tensor", (2, 1, 2)),
        Case("sequence", (2, 1, 2), FEWER, ("actor.parallel.sequence_parallel=true",)),
        Case(
            "long",
            (4, 1, 1),
            FEWER,
            ("actor.model.config.num_hidden_layers=8", "telemetry.trace_steps=1"),
        ),
    ],
}
BY_NAME = {case.name: case for cases in CASES.values() for case in cases}
# Others have what these have: "interleaved" packed rows, "padded" a second epoch; ``test_executor``
# runs replicas of pipelines and tensor ranks.
SLOW = ("pipeline", "uneven", "paired", "data", "sharded", "tensor", "sequence", "long")
NAMES = marked(BY_NAME, SLOW)


@dataclass
class Numbers:
    """All that one rank computed."""

    steps: list[dict[str, float]] = field(default_factory=list)
    evals: list[dict[str, float]] = field(default_factory=list)
    state: str = ""  # hash of weights and optimizer state


@dataclass
class Result:
    """A case's runs on one rank, the time-shared one stopped and resumed."""

    sequential: Numbers
    time_shared: Numbers
    # Of every time-shared step: the microbatches, and the reference's forwards on this rank for the
    # next step, and for this one in the step before.
    counts: list[tuple[int, int, int]] = field(default_factory=list)


class _Recording(DPOTrainer):
    """Notes all numbers; may ask its own process to stop."""

    numbers: Numbers
    stop_after: int | None

    def train_step(self, step: int) -> tuple[dict[str, float], StepStats]:
        metrics, stats = super().train_step(step)
        self.numbers.steps.append({**metrics, "flops": stats.num_flops})
        if step + 1 == self.stop_after:
            signal.raise_signal(signal.SIGTERM)
        return metrics, stats

    def evaluate(self) -> dict[str, float] | None:
        metrics = super().evaluate()
        self.numbers.evals.append(metrics or {})
        return metrics


def _job(case: Case, folder: Path, placement: str) -> JobConfig:
    pipeline, data, tensor = case.sizes
    return load_job(
        JOB,
        [
            *parallel("actor", P=pipeline, D=data, T=tensor),
            f"data.train={folder}/pairs.jsonl",
            f"data.cache_dir={folder}/cache",
            f"output_dir={folder}/{case.name}_{placement}",
            f"placement.reference={placement}",
            f"max_steps={case.steps}",
            "reference.model.config.num_hidden_layers=4",
            *case.overrides,
        ],
    )


def _run(job: JobConfig, world: World, numbers: Numbers, stop_after: int | None = None) -> None:
    trainer = _Recording(resolved(job, world.size), world)
    trainer.numbers, trainer.stop_after = numbers, stop_after
    trainer.run.is_cold = True  # as on a GPU: nothing stays of it
    run_to_end(trainer)
    ahead = trainer.run._lookahead
    assert ahead is None or min(ahead._sums, default=0) >= 0, "sums of steps that are over"
    numbers.state = state_hash(trainer)


def _both(rank: int, world_size: int, folder: Path, cases: list[Case]) -> list[Result]:
    world = World(rank, world_size, torch.device("cpu"))
    results = []
    execute = lookahead.execute
    for case in cases:
        result = Result(Numbers(), Numbers())
        results.append(result)
        _run(_job(case, folder, "sequential"), world, result.sequential)

        def counted(
            actions: list[Action], runs: dict[str, ModelRun], spans: None, counts=result.counts
        ) -> None:
            num_rows = len(runs["actor"].rows)
            ran = [a for a in actions if a.kind is Kind.FORWARD and a.model == "reference"]
            context = runs["actor"].context
            plan, ahead = context.plan, sum(a.microbatch >= num_rows for a in ran)
            counts.append((num_rows, ahead, num_rows * plan.virtual_pipeline - len(ran) + ahead))
            actor = Program("actor", num_rows, plan.virtual_pipeline, schedule=plan.schedule)
            trained = [a for a in actions if a.kind.is_compute and a.model == "actor"]
            assert trained == schedule_for(actor, plan.pipeline)[context.pipeline_rank]
            execute(actions, runs, spans)

        lookahead.execute = counted
        job = _job(case, folder, "time_shared")
        _run(job, world, result.time_shared, stop_after=case.stopped)
        _run(job, world, result.time_shared)
        lookahead.execute = execute
    return results


@pytest.fixture(scope="module")
def results(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> dict[str, list[Result]]:
    """Results of each rank by case name."""
    folder = tmp_path_factory.mktemp("runs")
    generator = random.Random(3)

    def text() -> str:
        return "x" * generator.randint(1, 20)

    rows = [{key: text() for key in ("prompt", "chosen", "rejected")} for _ in range(32)]
    (folder / "pairs.jsonl").write_text("\n".join(map(json.dumps, rows)))
    found, names = {}, asked(request, "name")
    for world_size, every in CASES.items():
        cases = [case for case in every if case.name in names]
        ranks = run_ranks(_both, world_size, folder, cases)
        found |= dict(zip([case.name for case in cases], zip(*ranks, strict=True), strict=True))
    return found


@pytest.mark.parametrize("name", NAMES)
def test_every_number_is_that_of_the_sequential_run(
    results: dict[str, list[Result]], name: str
) -> None:
    for rank in results[name]:
        assert len(rank.sequential.steps) == BY_NAME[name].steps
        assert len(rank.sequential.evals) > 1 and all(rank.sequential.evals)
        assert rank.time_shared == rank.sequential
    losses = [step["loss"] for step in results[name][0].sequential.steps]
    assert len(set(losses)) == len(losses)


@pytest.mark.parametrize("name", NAMES)
def test_the_reference_runs_ahead(results: dict[str, list[Result]], name: str) -> None:
    case = BY_NAME[name]
    for rank in results[name]:
        assert len(rank.counts) == case.steps
        assert len({num_rows for num_rows, *_ in rank.counts}) > 1
        assert rank.counts[-1][1] == 0
        made = [0, *(ahead for _, ahead, _ in rank.counts[:-1])]
        made[case.stopped] = 0  # a resumed run begins anew
        assert [before for *_, before in rank.counts] == made
    first = results[name][0].counts
    assert sum(ahead > 0 for _, ahead, _ in first) > case.steps // 2
