"""A loss of the user's: it is computed in place of a shipped one, and its faults are one line."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from puzzle_align.commands.validate import validate_job
from puzzle_align.config.check import JobProblems
from puzzle_align.config.load import load_job
from puzzle_align.runtime.liveness.failure import CannotGoOn
from puzzle_align.stages.preference.objective import ExampleOutputs, Objective, objective_of
from tests.jobs import problems_of
from tests.refusals import refusal

DOCS = Path(__file__).parents[2] / "docs" / "losses.md"
CODE = """
import torch

def hinge(logps, dpo):
    return torch.relu(1 - dpo.beta * (logps.chosen_ratios - logps.rejected_ratios))

def mean(logps, dpo):
    return hinge(logps, dpo).mean()

def greatest(logps, dpo):
    return logps.chosen - logps.chosen.detach().max()

def broken(logps, dpo):
    return logps.chosen_ratio

def detached(logps, dpo):
    return hinge(logps, dpo).detach()

def number(logps, dpo):
    return 0.5
"""


@pytest.fixture
def objective(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Objective]:
    shown = DOCS.read_text(encoding="utf-8").split("    def margin", 1)[1].split("\n\n", 1)[0]
    (tmp_path / "mylosses.py").write_text(f"{CODE}\ndef margin{shown}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    return lambda *overrides: objective_of(load_job("stage: dpo\n", overrides))


def examples() -> ExampleOutputs:
    seed = torch.Generator().manual_seed(4)
    outputs, reference = (20 * torch.randn(2, 9, 2, generator=seed)).double()
    return ExampleOutputs(
        outputs=outputs.requires_grad_(),
        reference=reference,
        lengths=torch.full((9, 2), 7),
        labels=torch.zeros(9),
        mean_nll_length=7.0,
    )


def gradient(made: Objective) -> tuple[Tensor, Tensor, Tensor]:
    given = examples()
    losses, values = made.losses(given)
    losses.sum().backward()
    assert given.outputs.grad is not None
    return losses.detach(), values, given.outputs.grad


@pytest.mark.parametrize("name", ["hinge", "margin"])  # the second as the docs show it
def test_it_is_the_shipped_loss_of_the_same_formula(
    name: str, objective: Callable[..., Objective]
) -> None:
    token_metrics = "telemetry.token_metrics=false"
    known = gradient(objective("dpo.loss_type=hinge", token_metrics))
    mine = gradient(objective(f"dpo.loss_function=mylosses:{name}", token_metrics))
    assert known[0].min() == 0 < known[0].max()
    for one, other in zip(known, mine, strict=True):
        assert torch.equal(one, other)


def test_held_out_pairs_need_no_gradient(objective: Callable[..., Objective]) -> None:
    made = objective("dpo.loss_function=mylosses:hinge", "telemetry.token_metrics=false")
    given = examples()
    trained, held_out = (
        made.losses(replace(given, outputs=outputs))[1]
        for outputs in (given.outputs, given.outputs.detach())
    )
    assert torch.equal(trained, held_out)


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("mean", "dpo.loss_function=mylosses:mean: returned []; return a tensor [9], a loss for"),
        ("number", "dpo.loss_function=mylosses:number: returned float; return a tensor [9], a los"),
        (
            "detached",
            "dpo.loss_function=mylosses:detached: returned values without a gradient; comp",
        ),
        ("broken", "dpo.loss_function=mylosses:broken: raised AttributeError: 'PairLogps' object"),
    ],
)
def test_a_wrong_one_ends_in_one_line(
    name: str, line: str, objective: Callable[..., Objective]
) -> None:
    made = objective(f"dpo.loss_function=mylosses:{name}", "telemetry.token_metrics=false")
    with pytest.raises(CannotGoOn) as error:
        made.losses(examples())
    assert str(error.value).startswith(line) and "\n" not in str(error.value)
    if name == "broken":
        assert "mylosses.py:14" in str(error.value)


def test_it_is_not_asked_for_empty_rows(objective: Callable[..., Objective]) -> None:
    """Of a data rank that has fewer rows than others; statistics of none are errors."""
    made = objective("dpo.loss_function=mylosses:greatest", "telemetry.token_metrics=false")
    given = examples()
    none = replace(
        given, **{name: getattr(given, name)[:0] for name in ("reference", "lengths", "labels")}
    )
    outputs = given.outputs.detach()[:0].requires_grad_()
    losses, values = made.losses(replace(none, outputs=outputs))
    losses.sum().backward()
    assert losses.shape == (0,) and len(values) == 0 and outputs.grad is not None


def test_one_that_is_not_there_is_said_at_the_start(objective: Callable[..., Objective]) -> None:
    found = refusal(lambda: objective("dpo.loss_function=mylosses:hnge"))
    assert found.startswith("dpo.loss_function=mylosses:hnge: no 'hnge' in ")


def test_one_that_is_not_there_is_listed_beside_other_problems() -> None:
    given = ["dpo.loss_function=no_such:hinge", "actor.model.path=/nowhere", "max_steps=1"]
    with pytest.raises(JobProblems) as raised:
        validate_job(load_job("stage: dpo\n", given), 1)
    for start in ("dpo.loss_function=no_such:hinge: no module", "actor.model.path: /nowhere"):
        assert sum(line.startswith(start) for line in raised.value.lines) == 1, raised.value.lines


def test_it_takes_the_place_of_the_others() -> None:
    job = load_job("stage: dpo\n", ["dpo.loss_function=a:b", "dpo.loss_type=ipo"])
    assert "dpo.loss_function: replaces dpo.loss_type; leave one of them out" in problems_of(job, 1)
    job = load_job("stage: dpo\n", ["dpo.loss_function=a:b", "dpo.loss_weights=[2.0]"])
    line = "dpo.loss_weights: weights are of dpo.loss_type, not dpo.loss_function; leave it out"
    assert line in problems_of(job, 1)
