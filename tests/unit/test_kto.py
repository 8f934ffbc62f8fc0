"""KTO's loss, its reference point and its metrics, against TRL's own and by hand."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from puzzle_align.algos.logprobs import STATISTICS
from puzzle_align.algos.preference import kl_divergence, kto_loss
from puzzle_align.config.job import JobConfig
from puzzle_align.config.sections.output import TelemetryConfig
from puzzle_align.config.sections.preference import KTOConfig
from puzzle_align.data.dataset import from_examples
from puzzle_align.data.loader import collate_row
from puzzle_align.runtime.row_input import sum_responses, to_device
from puzzle_align.stages.preference.objective import ExampleOutputs, objective_of
from tests.unit.labelled import with_labels

CPU = torch.device("cpu")
GOLDEN: dict[str, Any] = json.loads(
    (Path(__file__).parents[1] / "golden" / "kto_trl.json").read_text()
)
TOKENS, PROMPTS = GOLDEN["tokens"], GOLDEN["prompts"]
NUM = len(PROMPTS)
RESPONSES = from_examples(
    [([1] * p, [[2] * len(own)]) for p, own in zip(PROMPTS, TOKENS["log_probs"], strict=True)],
    pad_id=0,
)


def of_tokens(members: list[int], name: str) -> list[float]:
    return [value for member in members for value in TOKENS.get(name, TOKENS["entropy"])[member]]


def trained(case: dict[str, Any], rows: list[list[int]], token_metrics: bool) -> dict[str, float]:
    """The metrics of the batch, split over rows."""
    config = KTOConfig(**case["options"])
    telemetry = TelemetryConfig(token_metrics=token_metrics)
    objective = objective_of(JobConfig(stage="kto", kto=config, telemetry=telemetry))
    data = with_labels(RESPONSES, np.array(case["labels"], dtype=np.float64))
    kl = 0.0
    if config.estimates_kl:
        of_models = GOLDEN["mismatched"][case["mismatched"]]
        policy, reference = (
            torch.tensor(of_models[name], dtype=torch.float64) for name in ("policy", "reference")
        )
        kl = kl_divergence(policy, reference)
    values = torch.zeros(NUM, objective.num_values, dtype=torch.float64)
    for members in rows:
        ids = np.array(members)
        row = to_device(
            collate_row(data, np.arange(NUM), ids, layout="shared", num_tokens=64),
            "segments",
            CPU,
            objective.reading,
        )
        names = ("log_probs", *STATISTICS) if objective.statistics else ("log_probs",)
        outputs = torch.tensor([of_tokens(members, name) for name in names], dtype=torch.float64)
        reference = torch.tensor(of_tokens(members, "reference"), dtype=torch.float64)
        sums = sum_responses(row, outputs if objective.statistics else outputs[0])
        examples = ExampleOutputs(
            sums, sum_responses(row, reference), row.lengths, row.labels, 1.0, kl=kl
        )
        values[row.examples] = objective.losses(examples)[1]
    return objective.metrics(values)


@pytest.mark.parametrize("rows", [[[0, 1, 2, 3, 4, 5]], [[3, 0], [1, 4, 5], [2]]])
@pytest.mark.parametrize("case", GOLDEN["cases"], ids=lambda case: str(case["options"]))
def test_a_batch_is_trl_s_however_it_is_split(case: dict[str, Any], rows: list) -> None:
    expected = {k: v for k, v in case["logged"].items() if k != "num_tokens"}
    found = trained(case, rows, token_metrics=True)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, rel=1e-12), name
    plain = trained(case, rows, token_metrics=False)
    names = [name for name in expected if name != "entropy" and not name.startswith("logits/")]
    assert plain == {name: found[name] for name in names}


def test_gradients_push_desirable_responses_up_and_others_down() -> None:
    """Hand-derived: d/dr of ``w s(-beta (r - z))`` is ``-w beta s (1 - s)``; the others negate it.

    No gradient goes through the reference point.
    """
    ratios = torch.tensor([0.5, 0.5], dtype=torch.float64, requires_grad=True)
    config = KTOConfig(beta=0.3, desirable_weight=2.0, undesirable_weight=0.5)
    kto_loss(ratios, torch.tensor([1.0, 0.0]), 0.2, config).sum().backward()
    s = 1 / (1 + np.exp(0.3 * 0.3))
    slope = 0.3 * s * (1 - s)
    assert ratios.grad is not None
    np.testing.assert_allclose(ratios.grad.numpy(), [-2.0 * slope, 0.5 * slope], rtol=1e-14)
