"""Every shipped config parses, and is sound on the ranks it is made for."""

from pathlib import Path

import pytest

from puzzle_align.spec.check import problems
from puzzle_align.spec.load import dump_job, load_file, load_job
from puzzle_align.spec.model import num_parameters
from puzzle_align.spec.roles import resolve_role_spec, trained_role

CONFIGS = Path(__file__).parents[2] / "configs"
RANKS = {
    "dpo_tiny": (1, 2),
    "dpo_7b": (2, 8, 16),
    "dpo_70b": (32, 64),
    "reward_tiny": (1, 2),
    "reward_7b": (2, 8, 16),
}


def test_every_config_is_tested() -> None:
    assert {path.stem for path in CONFIGS.iterdir()} == set(RANKS)


@pytest.mark.parametrize("name", RANKS)
def test_a_shipped_config_is_sound_and_round_trips(name) -> None:
    job = load_file(CONFIGS / f"{name}.yaml")
    assert load_job(dump_job(job)) == job
    for ranks in RANKS[name]:
        assert problems(job, ranks) == []


@pytest.mark.parametrize("name", RANKS)
def test_a_shipped_config_writes_to_a_folder_of_its_own(name) -> None:
    assert load_file(CONFIGS / f"{name}.yaml").output_dir == f"runs/{name}"


@pytest.mark.parametrize(
    ("name", "billions"), [("dpo_7b", 7.25), ("dpo_70b", 70.55), ("reward_7b", 7.11)]
)
def test_the_large_configs_have_the_size_they_are_named_for(name, billions) -> None:
    job = load_file(CONFIGS / f"{name}.yaml")
    spec = resolve_role_spec(job, trained_role(job))
    assert num_parameters(spec) / 1e9 == pytest.approx(billions, abs=0.005)
