"""A DPO step in bare PyTorch computes what ours does, on the same rows of both layouts."""

from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch

from puzzle_align.config.sections.optimizer import OptimizerConfig
from puzzle_align.config.sections.preference import DPOConfig
from puzzle_align.models.shards import parameters_of, take_apart
from puzzle_align.runtime.context import Context
from puzzle_align.stages.preference.objective import ExampleOutputs, dpo_losses
from tests.dist.spawn import run_alone
from tests.unit.planner_spaces import tool

PAIRS = 4


def _weights(context: Context) -> dict[str, torch.Tensor]:
    """Weights under their names in Hugging Face's files, as views."""
    (chunk,) = context.chunks
    parameters = parameters_of(chunk, context.spec)
    return {name: value for p, held in parameters for name, value in take_apart(held.detach(), p)}


def _both(layout: str, recompute: str, max_grad_norm: float) -> list[dict[str, Any]]:
    """Log-probabilities, loss and updated weights of both stacks, in each of two steps."""
    setting, steps = tool("report.setting"), tool("dpo_steps")
    small = replace(setting.DRY, spec=replace(setting.DRY.spec, initializer_range=0.1))
    config = OptimizerConfig(lr=1e-2, adam_eps=1e-4, max_grad_norm=max_grad_norm)
    bench = setting.open_bench(small, small.spec, optimizer=config)
    generator = torch.Generator().manual_seed(5)
    for value in bench.policy.chunks[0].parameters():  # norms too, and unlike the reference's
        value.data += 0.05 * torch.randn(value.shape, generator=generator)
    bare = tool("bare_stack").BareStack(small.spec, bench.device, recompute, config)
    bare.policy.load_state_dict(_weights(bench.policy))
    bare.reference.load_state_dict(_weights(bench.reference))
    dataset = setting.open_dataset(small, "hh_rlhf", 2, PAIRS)
    ours, theirs, flex = (
        setting.rows_of(small, dataset, layout, PAIRS, name)
        for name in (bench.options.attention, bare.attention, "flex")
    )
    found = []
    for step in range(2):
        table = bench.reference_outputs(ours.rows(step), PAIRS, 2)
        outputs = steps.response_outputs(bench.policy, ours.rows(step), PAIRS, 2)
        pairs = ExampleOutputs(outputs, table, outputs, outputs, mean_nll_length=1.0)
        here: dict[str, Any] = {
            "rows": len(ours.rows(step)),
            "ours": (table, outputs, dpo_losses(DPOConfig(), pairs)[0].sum()),
        }
        for name, batches in (("bare", theirs), ("bare, flex", flex)):
            rows = batches.rows(step)
            table = bare.reference_outputs(rows, PAIRS, 2)
            outputs = tool("bare_stack").outputs_of(bare.policy, rows, PAIRS, 2)
            here[name] = (table, outputs, tool("bare_stack").dpo_loss(outputs, table))
        done = [steps.run_step(bench, ours, step), steps.run_step(bare, theirs, step)]
        here["work"] = [(each.num_pairs, each.num_tokens, each.num_rows) for each in done]
        here["weights"] = _weights(bench.policy), bare.policy.state_dict()
        found.append(deepcopy(here))
    return found


@pytest.mark.parametrize(
    "case",
    [
        ("shared", "none", 1.0),
        pytest.param(("paired", "full", 1e9), marks=pytest.mark.slow),
    ],
    ids=["clipped", "not clipped"],
)
def test_a_bare_step_computes_what_ours_does(case: tuple[str, str, float]) -> None:
    for step, found in enumerate(run_alone(_both, *case)):
        table, outputs, _ = found["ours"]
        assert found["rows"] > 1  # of the test: gradients add up over rows
        assert (outputs - table).abs().mean() > 1  # or any loss would be log 2
        for name in ("bare", "bare, flex"):
            for ours, bare in zip(found["ours"], found[name], strict=True):
                torch.testing.assert_close(bare.double(), ours.double(), rtol=1e-5, atol=1e-4)
        ours, bare = found["work"]
        assert ours == bare
        ours, bare = found["weights"]
        assert ours.keys() == bare.keys()
        for name, value in ours.items():
            torch.testing.assert_close(
                bare[name], value, rtol=1e-4, atol=1e-5, msg=f"{step} {name}"
            )
