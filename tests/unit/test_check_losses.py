"""Problems of a preference loss: one line each that names its key."""

import json

import pytest

from puzzle_align.config.load import find_config, load_file, load_job
from puzzle_align.layout.model import ModelOptions
from puzzle_align.stages.to_plan import job_to_plan, resolution_to_plan
from tests.declared import tiny_profile
from tests.jobs import job_plan
from tests.specs import CONFIG
from tests.unit.test_check import PP, SOUND, TP, assert_problem, order, problems_with

NARROW = json.dumps({**CONFIG, "intermediate_size": 96}, separators=(",", ":"))


@pytest.mark.parametrize(
    ("overrides", "start"),
    [
        ("dpo.loss_type=[]", ": [] names no loss"),
        ("dpo.loss_type=[ipo,ipo]", ": ipo is named twice"),
        ("dpo.loss_type=[ipo,sft] dpo.loss_weights=[1]", ": 1 weights for 2 losses"),
        ("dpo.loss_weights=[1,2]", ": 2 weights for 1 losses"),
        ("dpo.loss_type=[ipo,sft] dpo.loss_weights=[0,0]", ": all weights are 0; set at least one"),
        (
            "dpo.loss_type=[sigmoid,orpo]",
            ": orpo compares mean log-probabilities without a reference",
        ),
        ("dpo.loss_type=exo_pair", "dpo.label_smoothing: 0 makes loss exo_pair infinite"),
        (
            "dpo.loss_type=[ipo,apo_zero] dpo.f_divergence_type=forward_kl",
            ": forward_kl is not defined for loss apo_zero",
        ),
        ("dpo.loss_type=orpo dpo.ld_alpha=0.5", ": 0.5 is not for loss orpo"),
        ("dpo.ld_alpha=1.5", ": 1.5 is out of range; choose from 0 to 1"),
        ("dpo.loss_type=[ipo,sft] dpo.use_weighting=true", ": true is not defined for loss sft;"),
        ("dpo.loss_type=aot dpo.use_weighting=true", ": true is not defined for loss aot;"),
        (
            "dpo.sft_loss_weight=1 dpo.nll_scope=sequence",
            ": sequence is for losses without a reference, not for sigmoid",
        ),
        ("dpo.nll_scope=batch", ": batch means nothing to loss sigmoid"),
        (
            "dpo.sync_ref_model=true dpo.precompute_ref_log_probs=true",
            ": true, but dpo.sync_ref_model=true changes the reference; set it to false",
        ),
    ],
)
def test_what_a_loss_cannot_be_asked_for(overrides: str, start: str) -> None:
    assert_problem(overrides, start)


@pytest.mark.parametrize(
    ("overrides", "why"),
    [
        ("dpo.loss_type=orpo", "there is no reference to follow the policy"),
        ("reference.parallel.tensor_model_parallel_size=2", "reference.parallel is another"),
        (
            f"reference.model.random_weights=true reference.model.config={NARROW}",
            "reference.model has other dimensions than actor.model",
        ),
    ],
)
def test_what_keeps_the_reference_from_following_the_policy(overrides: str, why: str) -> None:
    assert_problem(
        f"dpo.sync_ref_model=true {overrides}", f"dpo.sync_ref_model: true, but {why}", ranks=2
    )


def test_a_reference_that_follows_runs_before_the_policy() -> None:
    synced = "dpo.sync_ref_model=true", "actor.parallel.pipeline_model_parallel_size=2"
    assert problems_with(*synced, ranks=2) == []
    assert order(load_job(SOUND, synced), 2) == "sequential"
    (line,) = problems_with(*synced, "placement.reference=time_shared", ranks=2)
    assert "dpo.sync_ref_model=true changes the reference between two steps" in line


def test_losses_of_a_list_are_sound() -> None:
    mixed = ["dpo.loss_type=[sigmoid, bco_pair, sft]", "dpo.loss_weights=[0.8, 0.2, 1]"]
    assert problems_with(*mixed) == []
    job = load_job(SOUND, mixed)
    assert job.dpo.losses == {"sigmoid": 0.8, "bco_pair": 0.2, "sft": 1.0}
    assert job.dpo.uses_reference and not job.dpo.compares_means
    # Label smoothing is some loss's, no divergence is everyone's.
    assert problems_with("dpo.loss_type=[hinge, robust]", "dpo.label_smoothing=0.1") == []
    assert load_job(SOUND, ["dpo.loss_type=[simpo]"]).dpo.compares_means
    for loss in ("loss_type=orpo", "sft_loss_weight=1"):
        assert problems_with(f"dpo.{loss}", "dpo.nll_scope=batch") == []
    assert problems_with("dpo.loss_type=orpo", "dpo.nll_scope=sequence") == []


def test_a_loss_that_sorts_is_not_planned_for() -> None:
    """The planner would time a step that has no forward before it."""
    keys = ["dpo.loss_type=aot", "dpo.precompute_ref_log_probs=true"]
    job = load_file(find_config("dpo_tiny"), keys)
    profile = tiny_profile(job)
    with pytest.raises(
        ValueError, match=r"a loss that sorts .*: the planner has no plans for such a step"
    ):
        job_to_plan(resolution_to_plan(job, profile), profile)


@pytest.mark.parametrize(
    ("overrides", "start"),
    [
        ("kto.desirable_weight=0 kto.undesirable_weight=0", "kto.desirable_weight: 0, and"),
        ("global_batch_size=1", ": 1 leaves no other response"),
        *(
            (
                f"data.max_length=1001 packing.layout=padded packing.row_tokens={tokens}",
                f": {tokens} cannot hold 1008 tokens, as long as prompts with other",
            )
            for tokens in (1001, 1007)
        ),
        ("kto.precompute_ref_log_probs=true", ": true, but loss kto (not apo_zero_"),
        (
            f"kto.sync_ref_model=true placement.reference=time_shared {PP}=2",
            "placement.reference: time_shared, but kto.sync_ref_model=true changes the reference",
        ),
    ],
)
def test_what_kto_cannot_be_asked_for(overrides: str, start: str) -> None:
    assert_problem(f"stage=kto {overrides}", start, ranks=2)


def test_what_kto_can_be_asked_for() -> None:
    padded = "stage=kto", "packing.layout=padded"
    assert (
        problems_with(*padded, "packing.row_tokens=1000", "data.max_length=999", f"{TP}=2", ranks=2)
        == []
    )
    assert problems_with(*padded, "packing.row_tokens=1008", "data.max_length=1001") == []
    assert problems_with("stage=kto", "global_batch_size=2", "kto.desirable_weight=0") == []
    full = "packing.row_tokens=1001", "data.max_length=1001"  # no prompt meets other responses
    assert problems_with(*padded, *full, "kto.loss_type=apo_zero_unpaired") == []
    assert problems_with("packing.layout=padded", *full) == problems_with("stage=kto", *full) == []


def test_the_unpaired_loss_without_a_kl_term_is_against_a_reference_alone() -> None:
    without = ["stage=kto", "kto.loss_type=apo_zero_unpaired"]
    assert problems_with(*without, "global_batch_size=1") == []
    assert problems_with(*without, "kto.precompute_ref_log_probs=true") == []
    phases = {}
    for name, keys in (("kto", ["stage=kto"]), ("apo", without)):
        job = load_job(SOUND, [*keys, f"{PP}=2"])
        plan = job_plan(job, ModelOptions(), 2)
        phases[name] = [(phase.name, phase.order, phase.roles) for phase in plan.phases]
    train = ("train", "time_shared", ("reference", "actor"))
    assert phases == {"kto": [("kl", "time_shared", ("reference", "actor")), train], "apo": [train]}
