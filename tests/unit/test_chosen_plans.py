"""Every plan that the planner can choose is one that the job runs."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from puzzle_align.config.chosen_plan import ChosenPlan
from puzzle_align.config.load import find_config, load_file
from puzzle_align.config.resolve import Engine, resolve
from puzzle_align.planning.search.evaluation import Evaluation
from puzzle_align.planning.search.space import Choice, SamplingChoice, Space
from puzzle_align.stages.outlook import open_outlook
from puzzle_align.stages.to_plan import job_to_plan, resolution_to_plan
from tests.declared import tiny_profile, tiny_space

EVERY_MODE = {"colocated", "apart", "before", "another grid"}
FEW = ("data.num_synthetic=200", "telemetry.progress=false")


def samplings(space: Space, choice: Choice) -> Iterator[SamplingChoice | None]:
    """One of every plan that the actor can sample under beside a choice."""
    if not space.job.samples:
        yield None
        return
    for number in {len(choice.context("actor").ranks), space.cluster.num_ranks}:
        yield from {sampling.plan: sampling for sampling in space.samplings(number)}.values()


@pytest.mark.parametrize(
    ("name", "num_ranks", "overrides", "modes"),
    [
        ("dpo_tiny", 1, [], {"colocated", "before"}),
        ("dpo_tiny", 3, [], EVERY_MODE),
        ("dpo_tiny", 4, [], EVERY_MODE),
        ("dpo_tiny", 4, ["dpo.reference_free=true"], {"colocated"}),
        ("kto_tiny", 3, [], EVERY_MODE - {"before"}),
        ("kto_tiny", 2, ["kto.loss_type=apo_zero_unpaired"], EVERY_MODE),
        ("reward_tiny", 4, [], {"colocated"}),
        ("ppo_tiny", 2, [], {"colocated", "apart"}),
        ("ppo_tiny", 3, ["ppo.kl_coef=0"], {"colocated", "apart"}),
    ],
)
def test_plans_fit_the_job(
    name: str, num_ranks: int, overrides: list[str], modes: set[str], tmp_path: Path
) -> None:
    given = [*FEW, f"output_dir={tmp_path}", "engine.logprob_chunk_size=96", *overrides]
    config = load_file(find_config(name), given)
    profile = tiny_profile(config)
    space = tiny_space(name, num_ranks, given, profile)
    assert space.job.options.logprob_chunk_size == 96
    chosen_modes = set()
    for choice in space.choices():
        for sampling in samplings(space, choice):
            planned = Evaluation(space).planned(choice, sampling)
            plan, settings = planned.plan, planned.settings
            chosen = ChosenPlan(source="the plan", plan=plan, settings=settings, device="cpu")
            job = resolve(config, Engine("cpu", space.job.options), num_ranks, chosen)
            assert (job.plan, job.settings) == (plan, settings)
            assert job.config.packing.row_tokens == settings.row_tokens
            loss = job.config.reference_loss
            before = loss is not None and loss.precompute_ref_log_probs
            assert before == (choice.mode == "before")
            chosen_modes.add(choice.mode)
    assert chosen_modes == modes


@pytest.mark.parametrize("torch", ["2.8.0", "2.11.0+cu130", "2.12.0"])
def test_sampling_ranks_ascend_where_the_profiled_torch_sorts_them(
    torch: str, tmp_path: Path
) -> None:
    given = [*FEW, f"output_dir={tmp_path}"]
    config = load_file(find_config("ppo_tiny"), given)
    profile = tiny_profile(config)
    profile = replace(profile, hardware=replace(profile.hardware, versions={"torch": torch}))
    engine = resolution_to_plan(config, profile).engine
    assert engine.orders_ranks == (torch == "2.12.0")
    space, orders = tiny_space("ppo_tiny", 4, given, profile), set()
    for choice in space.choices():
        for sampling in samplings(space, choice) if choice.mode == "colocated" else ():
            planned = Evaluation(space).planned(choice, sampling)
            plan, settings = planned.plan, planned.settings
            chosen = ChosenPlan(source="the plan", plan=plan, settings=settings, device="cpu")
            assert resolve(config, engine, 4, chosen).plan == plan
            orders.add(plan.context("actor", "generate").ranks)
    assert (len(orders) > 1) == engine.orders_ranks


def test_tensor_ranks_share_sequences_on_cuda_and_where_they_are_asked_to() -> None:
    for device, asked, wanted in (
        ("cpu", "false", False),
        ("cpu", "true", True),
        ("cuda", "false", True),
    ):
        keys = ["engine.device=auto", f"actor.parallel.sequence_parallel={asked}"]
        job = load_file(find_config("dpo_tiny"), keys)
        profile = tiny_profile(job)
        profile = replace(profile, hardware=replace(profile.hardware, device=device))
        assert job_to_plan(resolution_to_plan(job, profile), profile).sequence_parallel == wanted


def test_rows_hold_the_longest_example_that_the_job_allows(tmp_path: Path) -> None:
    """The data's longest has 11 tokens, but a job with rows below data.max_length is refused."""
    given = [*FEW, f"output_dir={tmp_path}", "data.max_length=200"]
    profile = tiny_profile(load_file(find_config("dpo_tiny"), given), rows=(128, 256))
    assert tiny_space("dpo_tiny", 2, given, profile).row_sizes == [256]
    for packed, least in (("true", 203), ("false", 208)):  # padded to a multiple of 8
        own = [*given, "data.max_length=203", f"packing.enabled={packed}"]
        load = open_outlook(load_file(find_config("dpo_tiny"), own)).load()
        assert load.least_row_tokens == least
    new = [*FEW, f"output_dir={tmp_path}", "data.max_length=256", "generation.max_new_tokens=32"]
    given = [*new, "data.max_prompt_length=32"]
    profile = tiny_profile(load_file(find_config("ppo_tiny"), given), rows=(128, 512))
    assert tiny_space("ppo_tiny", 2, given, profile).row_sizes == [512]


@pytest.mark.parametrize(
    ("eval_every", "evaluations"),
    [(4, 1 + 3), (5, 1 + 2), (0, 1 + 1), (20, 1 + 1)],  # of ten steps, before the first and after
)
def test_a_job_evaluates_and_goes_over_all_data_so_often(
    eval_every: int, evaluations: int, tmp_path: Path
) -> None:
    """In batches of 16, of 150 pairs to train on and 50 held out."""
    given = [*FEW, f"output_dir={tmp_path}", "global_batch_size=16", "max_steps=10"]
    given += [f"telemetry.eval_every={eval_every}", "data.eval_fraction=0.25"]
    load = open_outlook(load_file(find_config("dpo_tiny"), given)).load()
    assert (load.num_examples, load.num_iterations) == (16, 10)
    assert load.num_evaluations == evaluations
    assert (load.data_batches, load.held_out_batches) == (200 / 16, 50 / 16)
    # At most 2 * 128 tokens a pair: one in a row, two, three.
    assert [load.most_rows(row_tokens) for row_tokens in (200, 512, 768)] == [16, 8, 6]
    job = load_file(find_config("dpo_tiny"), [*given, "data.eval_fraction=0"])
    load = open_outlook(job).load()
    assert (load.data_batches, load.held_out_batches) == (200 / 16, 0)


def test_rows_that_are_packed_beforehand_keep_their_length(tmp_path: Path) -> None:
    """Their length decides how many pairs a step has, and of packed files it is given."""
    given = [*FEW, f"output_dir={tmp_path}", "packing.scope=dataset", "packing.row_tokens=256"]
    job = load_file(find_config("dpo_tiny"), given)
    profile = tiny_profile(job, rows=(128, 256, 512))
    assert tiny_space("dpo_tiny", 2, given, profile).row_sizes == [256]
    with pytest.raises(ValueError, match="packed beforehand, have 256: profile with --tokens 256$"):
        tiny_space("dpo_tiny", 2, given, tiny_profile(job, rows=(128, 512)))
