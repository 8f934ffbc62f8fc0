"""Losses and metrics of whole batches against TRL's own, from the values of every token."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from puzzle_align.algos.logprobs import STATISTICS
from puzzle_align.algos.preference import sorted_partners
from puzzle_align.config.job import JobConfig
from puzzle_align.config.sections.output import TelemetryConfig
from puzzle_align.config.sections.preference import DPOConfig
from puzzle_align.data.dataset import from_examples
from puzzle_align.data.loader import ExampleLoader, collate_row
from puzzle_align.layout.flops import attention_flops, flops_per_token, head_flops_per_token
from puzzle_align.layout.model import with_scalar_head
from puzzle_align.runtime.batches import DataBatches
from puzzle_align.runtime.row_input import RowInput, sum_responses, to_device
from puzzle_align.stages.preference.objective import CHOSEN, ExampleOutputs, Objective, objective_of
from puzzle_align.stages.preference.trainer import _forward_flops, _mean_nll_length
from tests.specs import TINY
from tests.unit.test_loader import make_loader

CPU = torch.device("cpu")
VALUES = Path(__file__).parents[1] / "golden" / "preference_trl_batches.json"
GOLDEN: dict[str, Any] = json.loads(VALUES.read_text())
TOKENS = GOLDEN["tokens"]
LENGTHS = np.array([[len(response) for response in pair] for pair in TOKENS["log_probs"]])
PAIRS = from_examples(
    [
        ([*range(10, 10 + prompt)], [[2] * length for length in pair])
        for prompt, pair in zip(GOLDEN["prompts"], LENGTHS.tolist(), strict=True)
    ],
    pad_id=0,
)


def of_dpo(config: DPOConfig, token_metrics: bool) -> Objective:
    return objective_of(
        JobConfig(dpo=config, telemetry=TelemetryConfig(token_metrics=token_metrics))
    )


def row_of(pairs: list[int], objective: Objective, layout: str) -> RowInput:
    """A row with these pairs of the batch."""
    members, ids = np.arange(len(PAIRS)), np.array(pairs)
    microbatch = collate_row(PAIRS, members, ids, layout=layout, num_tokens=96)
    return to_device(microbatch, "segments", CPU, objective.reading)


def of_tokens(pairs: list[int], *names: str) -> torch.Tensor:
    """Outputs of a model for the row: float64 [len(names), N]."""
    rows = [
        [v for pair in pairs for branch in TOKENS[name][pair] for v in branch] for name in names
    ]
    return torch.tensor(rows, dtype=torch.float64)


def trained(objective: Objective, rows: list[list[int]], layout: str) -> dict[str, float]:
    """The metrics of the batch, split over rows."""
    whole = row_of(list(range(len(PAIRS))), objective, layout)
    partners = sorted_partners(
        *(
            sum_responses(whole, of_tokens(list(range(len(PAIRS))), name)[0])
            for name in ("log_probs", "reference")
        )
    )
    values = torch.zeros(len(PAIRS), objective.num_values, dtype=torch.float64)
    loss = 0.0
    for pairs in rows:
        row = row_of(pairs, objective, layout)
        outputs = of_tokens(pairs, "log_probs", *STATISTICS)
        outputs = outputs if objective.statistics else outputs[0]
        reference = of_tokens(pairs, "reference")[0]
        losses, values[row.examples] = objective.losses(
            ExampleOutputs(
                sum_responses(row, outputs),
                sum_responses(row, reference),
                row.lengths,
                row.labels,
                mean_nll_length=float(LENGTHS[:, CHOSEN].mean()),
                partners=partners[row.examples],
            )
        )
        loss += losses.sum().item() / len(PAIRS)
    metrics = objective.metrics(values)
    assert metrics["loss"] == pytest.approx(loss, rel=1e-14)
    return metrics


@cache
def cases() -> list[tuple[dict[str, Any], dict[str, float]]]:
    return [(case["options"], case["logged"]) for case in GOLDEN["cases"]]


@pytest.mark.parametrize("layout", ["shared", "paired"])
@pytest.mark.parametrize("rows", [[[0, 1, 2, 3, 4]], [[3, 0], [1, 4], [2]]])
@pytest.mark.parametrize("case", range(len(cases())))
def test_a_batch_is_trl_s_however_it_is_split(case: int, rows: list, layout: str) -> None:
    options, expected = cases()[case]
    config = DPOConfig(**options)
    found = trained(of_dpo(config, token_metrics=True), rows, layout)
    found["num_tokens"] = DataBatches(loader(), "segments", CPU).tokens_seen(0)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        # Its accuracies and LD-DPO's weights are of float32.
        rel = 1e-6 if name == "mean_token_accuracy" or config.ld_alpha is not None else 1e-12
        assert found[name] == pytest.approx(value, rel=rel), name


def loader() -> ExampleLoader:
    return make_loader(PAIRS, global_batch_size=len(PAIRS), row_tokens=96, seed=0)


def test_tokens_are_counted_from_the_step_alone() -> None:
    """64 an epoch of one step: those of every response with its prompt."""
    steps = DataBatches(loader(), "segments", CPU)
    assert [steps.tokens_seen(step) for step in range(3)] == [64, 128, 192]
    assert [steps.tokens_seen(step) for step in (2, 5, 1)] == [192, 6 * 64, 128]
    assert DataBatches(loader(), "segments", CPU).tokens_seen(7) == 8 * 64


@pytest.mark.parametrize("layout", ["shared", "paired"])
def test_a_likelihood_takes_in_the_prompt_where_trl_s_orpo_does(layout: str) -> None:
    """It counts every prompt's tokens but the first, once; the odds are the response's alone."""
    objective = of_dpo(DPOConfig(loss_type="orpo", nll_scope="sequence"), token_metrics=False)
    assert objective.statistics
    row = row_of([2, 0], objective, layout)
    prompts = [GOLDEN["prompts"][pair] - 1 for pair in (2, 0)]
    assert row.num_response_tokens == LENGTHS[[0, 2]].sum()
    assert row.predictions.targets is not None
    texts = [token for number in prompts for token in range(11, 11 + number)]
    assert row.predictions.targets.tolist() == [2] * row.num_response_tokens + texts
    sources = row.predictions.predict_from[row.num_response_tokens :]
    assert row.tokens[0, sources].tolist() == [token - 1 for token in texts]  # the one before
    of_responses = of_tokens([2, 0], "log_probs", *STATISTICS)
    of_prompts = torch.full((5, sum(prompts)), -0.5, dtype=torch.float64)
    sums = sum_responses(row, torch.cat([of_responses, of_prompts], dim=1))
    plain = sum_responses(row_of([2, 0], of_dpo(DPOConfig(), True), layout), of_responses)
    assert torch.equal(sums[0], plain[0]) and torch.equal(sums[2:], plain[2:])
    in_prompts = torch.tensor([prompts[1], prompts[0]], dtype=torch.float64)
    torch.testing.assert_close(sums[1, :, 0], plain[1, :, 0] - 0.5 * in_prompts, rtol=1e-14, atol=0)
    assert torch.equal(sums[1, :, 1], plain[1, :, 1])
    num_predicted = LENGTHS[[2, 0], CHOSEN].sum() + sum(prompts)
    assert _mean_nll_length(objective, PAIRS, np.array([2, 0])) == num_predicted / 2


@pytest.mark.parametrize("loss_type", ["simpo", "orpo", "hinge"])
def test_without_a_reference_log_probabilities_are_shown_as_means(loss_type: str) -> None:
    """TRL's CPO and ORPO trainers log the values that they compare; others log sums."""
    found = trained(of_dpo(DPOConfig(loss_type=loss_type), False), [[0, 1, 2, 3, 4]], "shared")
    shown = np.array([[sum(branch) for branch in pair] for pair in TOKENS["log_probs"]])
    if loss_type != "hinge":
        shown /= LENGTHS
    expected = dict(zip(("logps/chosen", "logps/rejected"), shown.mean(axis=0), strict=True))
    assert {name: found[name] for name in expected} == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(("layout", "copies"), [("shared", 1), ("paired", 2)])
def test_a_forward_s_flops_are_of_its_tokens_and_of_those_they_attend_to(
    layout: str, copies: int
) -> None:
    """Each response follows its whole prompt, and a reward is one product with the head."""
    num_tokens = seen = 0
    for prompt, lengths in zip(GOLDEN["prompts"], LENGTHS.tolist(), strict=True):
        num_tokens += copies * prompt + sum(lengths)
        seen += copies * sum(range(1, prompt + 1))
        seen += sum(sum(range(prompt + 1, prompt + length + 1)) for length in lengths)
    batch = make_loader(PAIRS, global_batch_size=len(PAIRS), row_tokens=96, layout=layout).batch(0)
    for spec, predicted in ((TINY, LENGTHS.sum()), (with_scalar_head(TINY), LENGTHS.size)):
        matrices = num_tokens * flops_per_token(spec) + predicted * head_flops_per_token(spec)
        expected = matrices, attention_flops(spec, seen)
        assert _forward_flops(spec, PAIRS, layout, batch) == expected
