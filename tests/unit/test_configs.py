"""Every shipped config parses, and is sound on the ranks it is made for."""

import json
import time
from math import inf
from pathlib import Path

import pytest

from puzzle_align.config.load import dump_job, load_file, load_job
from puzzle_align.config.resolve import resolve
from puzzle_align.config.stages import PROMPTS
from puzzle_align.data.tokenize import ByteTokenizer
from puzzle_align.layout.plan import ParallelPlan
from puzzle_align.layout.weights import num_parameters
from puzzle_align.planning.load import GenerationLoad
from puzzle_align.planning.memory.job import estimate_memory
from puzzle_align.stages.banner import memory_inputs
from puzzle_align.stages.engine import resolve_engine
from puzzle_align.stages.outlook import open_outlook, proven_rows
from puzzle_align.stages.run import write_config
from tests.jobs import model_of, problems_of

CONFIGS = Path(__file__).parents[2] / "configs"
RANKS = {
    "dpo_tiny": (1, 2),
    "dpo_7b": (2, 8, 16),
    "dpo_7b_1gpu": (1, 2),
    "dpo_7b_lora": (1, 2),
    "dpo_tiny_lora": (1, 2),
    "dpo_70b": (32, 64),
    "kto_tiny": (1, 2),
    "kto_7b": (2, 8, 16),
    "reward_tiny": (1, 2),
    "reward_7b": (2, 8, 16),
    "ppo_tiny": (1, 2),
    "ppo_7b": (4, 8, 16),
    "ppo_7b_lora": (1, 8, 16),
    "ppo_tiny_lora": (1, 2),
    "ppo_33b_7b": (16, 32, 64),
    "grpo_tiny": (1, 2),
    "grpo_7b": (4, 8, 16),
}


def test_every_config_is_tested() -> None:
    assert {path.stem for path in CONFIGS.iterdir()} == set(RANKS)


@pytest.mark.parametrize("name", RANKS)
def test_a_shipped_config_is_sound_round_trips_and_has_its_own_folder(name) -> None:
    job = load_file(CONFIGS / f"{name}.yaml")
    assert load_job(dump_job(job)) == job and job.output_dir == f"runs/{name}"
    assert job.engine.world_size in RANKS[name], "--validate would show the fewest ranks"
    for ranks in RANKS[name]:
        assert problems_of(job, ranks) == []


@pytest.mark.parametrize("name", RANKS)
def test_the_config_that_a_run_writes_is_its_job(name, tmp_path) -> None:
    job = load_file(CONFIGS / f"{name}.yaml", ["seed=7", f"output_dir={tmp_path}"])
    engine, ranks = resolve_engine(job.engine, elsewhere=True), RANKS[name][0]
    resolved = resolve(job, engine, ranks)
    write_config(resolved.config)
    written = load_file(tmp_path / "config.yaml")
    assert written == resolved.config and written.seed == 7
    assert resolve(written, engine, ranks) == resolved


@pytest.mark.parametrize(
    ("name", "role", "billions"),
    [
        ("dpo_7b", "actor", 7.25),
        ("dpo_7b_1gpu", "actor", 7.25),
        ("dpo_70b", "actor", 70.55),
        ("kto_7b", "actor", 7.25),
        ("reward_7b", "reward", 7.11),
        ("ppo_7b", "actor", 7.25),
        ("ppo_7b", "critic", 7.11),
        ("ppo_33b_7b", "reference", 32.53),
        ("ppo_33b_7b", "reward", 6.61),
        ("grpo_7b", "actor", 7.25),
    ],
)
def test_the_large_configs_have_the_size_they_are_named_for(name, role, billions) -> None:
    spec = model_of(load_file(CONFIGS / f"{name}.yaml"), role).spec
    assert num_parameters(spec) / 1e9 == pytest.approx(billions, abs=0.005)


def estimated(name: str, ranks: int, *overrides: str, cuda: bool = False) -> float:
    """Bytes on the rank with the most; with ``cuda``'s own as ``--validate`` prints them."""
    job = load_file(CONFIGS / f"{name}.yaml", overrides)
    made = resolve(job, resolve_engine(job.engine, elsewhere=True), ranks)
    preview = open_outlook(job).preview(made.plan, None, [])
    inputs = memory_inputs(made.settings, preview, cuda=cuda)
    if job.stage in PROMPTS:
        assert set(inputs.runs) == {"score", "learn"}
    columns = estimate_memory(made.plan, inputs)
    return max(parts["total"] for parts in columns.values())


# A tenth is left for what the estimate does not count.
@pytest.mark.parametrize(("name", "ranks"), [("ppo_7b", 8), ("ppo_33b_7b", 32), ("grpo_7b", 8)])
def test_the_models_of_ppo_fit_into_80_gb_together(name, ranks) -> None:
    assert estimated(name, ranks) < 0.9 * 80e9


def test_dpo_of_a_7b_model_fits_on_one_gpu() -> None:
    offloaded = "optimizer.cpu_offload=true"
    comment = (CONFIGS / "dpo_7b_1gpu.yaml").read_text()
    for overrides, device in (((), 141e9), ((offloaded,), 80e9)):
        needed = estimated("dpo_7b_1gpu", 1, *overrides, cuda=True)
        assert needed < 0.9 * device
        assert f"{needed / 2**30:.2f} GiB ({needed / 1e9:.0f} GB)" in comment
    assert estimated("dpo_7b_1gpu", 1) > 80e9
    more = estimated("dpo_7b_1gpu", 1, "actor.parallel.recompute=none") - 106e9
    assert more == pytest.approx(33e9, abs=1e9)


def test_dpo_of_a_7b_model_with_adapters_has_its_weights_once() -> None:
    needed = estimated("dpo_7b_lora", 1, cuda=True)
    comment = (CONFIGS / "dpo_7b_lora.yaml").read_text()
    assert f"{needed / 2**30:.2f} GiB ({needed / 1e9:.0f} GB)" in comment
    assert needed < 2 * 2 * 7.25e9  # two copies in bf16


def test_ppo_of_a_7b_model_with_adapters_has_its_weights_once() -> None:
    needed = estimated("ppo_7b_lora", 8, cuda=True)
    comment = (CONFIGS / "ppo_7b_lora.yaml").read_text()
    assert f"{needed / 2**30:.2f} GiB ({needed / 1e9:.0f} GB)" in comment
    three = 3 * 2 * 7.11e9  # further copies in bf16
    config = load_file(CONFIGS / "ppo_7b_lora.yaml").actor.model.config
    own = {"base": None, "model": {"config": config}}
    given = {"reference": own, "reward": own, "critic": {**own, "lora": {"r": 16}}}
    apart = [f"{role}={json.dumps(keys)}" for role, keys in given.items()]
    more = estimated("ppo_7b_lora", 8, *apart, cuda=True) - needed
    assert three < more < 1.03 * three


def test_a_plan_that_needs_more_than_one_rank_names_the_config_for_one() -> None:
    (problem,) = problems_of(load_file(CONFIGS / "dpo_7b.yaml"), 1)
    assert problem == (
        "actor.parallel: P·T = 2 does not divide 1 rank: start a multiple of 2, or change the "
        "sizes, as dpo_7b_1gpu does for one GPU"
    )
    assert "1gpu" not in problems_of(load_file(CONFIGS / "dpo_7b.yaml"), 7)[0]


def test_a_replica_samples_every_response_of_its_prompts() -> None:
    """One of two replicas has three of five prompts, with four responses each."""
    job = load_file(CONFIGS / "ppo_tiny.yaml", ["global_batch_size=5", "ppo.num_mini_batches=1"])
    plan = resolve(job, resolve_engine(job.engine, elsewhere=True), 2).plan
    assert plan.context("actor", "generate").plan.data == 2
    generation = open_outlook(job).preview(plan, None, []).generation
    assert generation is not None and generation.num_sequences == 3 * 4


def test_the_planner_s_load_of_a_sampling_job_by_hand(tmp_path) -> None:
    """Prompts of 8 tokens, of at most 16, with responses of 5.6 on average, of at most 16."""
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"prompt": "7 bytes"}) + "\n")
    own = ["tokenizer.path=byte", "actor.model.random_weights=true"]
    data = [f"data.train={tmp_path}/prompts.jsonl", "data.format=auto", f"output_dir={tmp_path}"]
    sizes = ["global_batch_size=4", "ppo.ppo_epochs=3", "max_steps=15", "packing.row_tokens=64"]
    load, greedy = (
        open_outlook(load_file(CONFIGS / "ppo_tiny.yaml", [*own, *data, *sizes, *more])).load(5.6)
        for more in ((), ("ppo.advantage_estimator=remax",))
    )
    assert (load.scored_batches, greedy.scored_batches) == (1, 1 + 1 / 4)
    assert (load.num_examples, load.num_iterations) == (16, 15)
    assert (load.mini_batches, load.epochs, load.least_row_tokens) == (2, 3, 32)
    assert load.generation == GenerationLoad(
        num_prompts=4,
        num_generations=4,
        prompt_tokens=8.0,
        response_tokens=6,
        longest_prompt=16,
        longest_response=16,
    )
    # A row of 64 holds two prompts with their responses, each of 8 + 4 * 6 tokens.
    for batches, data_size, microbatches in ((1, 1, 2), (2, 1, 1), (1, 2, 1)):
        found = load.rows(64, batches, ParallelPlan(data=data_size))
        assert (found.microbatches, found.row.row_tokens) == (microbatches, 64)
        assert found.row.predictions == 2 * 4 * 6
    # At the greatest length it holds two of the responses to one prompt, one of 80 all four.
    assert [load.most_rows(tokens) for tokens in (64, 80, 160)] == [4, 2, 1]


def test_responses_that_no_token_ends_are_a_problem_of_a_sampling_job(tmp_path) -> None:
    given = ["actor.model.config.eos_token_id=null", "data.num_synthetic=8", "max_steps=1"]
    job = load_file(CONFIGS / "ppo_tiny.yaml", [*given, f"output_dir={tmp_path}"])
    made = resolve(job, resolve_engine(job.engine, elsewhere=True), 2)
    for eos_id, number in ((258, 0), (None, 1)):
        tokenizer, problems = ByteTokenizer(), []
        tokenizer.eos_id = eos_id
        preview = open_outlook(job).preview(made.plan, tokenizer, problems)
        assert len(preview.datasets) == 1 and len(problems) == number
        assert all(line.startswith("generation.stop_token_ids: null, and") for line in problems)


def test_memory_is_of_so_many_rows_that_it_grows_no_further() -> None:
    """Four microbatches for each of two pipeline ranks and chunks, of each of three replicas."""
    plan = ParallelPlan(pipeline=2, virtual_pipeline=2, data=3)
    assert proven_rows(plan) == 4 * 2 * 2 * 3
    assert proven_rows(ParallelPlan(pipeline=2, schedule="gpipe")) == inf


def test_absurd_numbers_are_reported_at_once() -> None:
    start = time.process_time()
    odd = ["global_batch_size=2000000000", "ppo.num_mini_batches=1999999999"]
    job = load_file(CONFIGS / "ppo_tiny.yaml", odd)
    assert problems_of(job, 1) == [
        "ppo.num_mini_batches: 1999999999 do not divide the 2000000000 prompts of an iteration; "
        "choose 1000000000, or global_batch_size=3999999998"
    ]
    many = ["global_batch_size=2000000000", "generation.num_generations=2000000000"]
    job = load_file(CONFIGS / "ppo_tiny.yaml", many)
    made = resolve(job, resolve_engine(job.engine, elsewhere=True), 1)
    preview = open_outlook(job).preview(made.plan, None, [])
    inputs = memory_inputs(made.settings, preview, cuda=False)
    assert estimate_memory(made.plan, inputs)
    assert problems_of(job, 10**9) == ["1000000000 ranks: there may be 16384 at most; start fewer"]
    job = load_file(CONFIGS / "ppo_tiny.yaml", ["actor.ranks=0-999999999"])
    assert "is not a rank range; write the first and the last" in problems_of(job, 1)[0]
    assert time.process_time() - start < 10
