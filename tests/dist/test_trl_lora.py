"""Runs of DPO with adapters against TRL's DPOTrainer with a ``peft_config``: same base, adapters.

``tests/golden/make_dpo_trl_lora.py`` runs TRL in float64, eight AdamW steps. Ours run in float32,
under several plans; of each step the loss, the adapters' gradients and what TRL logs, and at last
the adapters are held to 1e-5. A tensor's product with a wave is held to 1e-5 of the tensor's norm,
and a reward, a difference of terms of about 4, to 1e-5.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from puzzle_align.config.load import load_job
from puzzle_align.layout.model import ModelSpec
from puzzle_align.layout.rules import Box
from puzzle_align.layout.weights import adapter_shapes, is_adapter
from puzzle_align.models.shards import parameters_of, slices
from puzzle_align.runtime.context import Context
from puzzle_align.runtime.groups.world import World
from puzzle_align.runtime.optimizer.optimizer import Optimizer
from puzzle_align.stages.dpo import DPOTrainer
from tests.dist.given_adapters import BATCH, CASES, STEPS, adapters, pairs, save_adapters, save_base
from tests.dist.given_steps import sums_of
from tests.dist.spawn import run_ranks
from tests.jobs import parallel, problems_of, resolved

TRL = json.loads((Path(__file__).parents[1] / "golden" / "dpo_trl_lora.json").read_text())["cases"]
JOB = f"""
stage: dpo
global_batch_size: {BATCH}
max_steps: {STEPS}
engine: {{device: cpu}}
tokenizer: {{path: byte}}
data: {{format: auto, shuffle: false, max_length: 48}}
packing: {{row_tokens: 64}}
dpo: {{beta: 0.1}}
reference: {{base: actor}}
optimizer:
  lr: 0.002
  lr_scheduler_type: constant
  warmup_steps: 0
  weight_decay: 0.1
  max_grad_norm: 0.5
  adam_beta1: 0.9
  adam_beta2: 0.95
  adam_eps: 1.0e-4
telemetry: {{progress: false, tensorboard: false}}
"""
PLANS = {
    "one": (1, []),
    "P2": (2, parallel("actor", P=2)),
    "D2": (2, parallel("actor", D=2)),
    "T2": (2, parallel("actor", T=2)),
    "P2 T2 sp": (4, parallel("actor", P=2, T=2, sp=True)),
}
SAME = ("grad_norm", "rewards/chosen", "rewards/rejected", "rewards/accuracies", "logps/chosen")
BOUND = 1e-5
MOVE_BOUND = 2e-5  # of the movement: about 0.01, and float32 rounds weights near 1 by 6e-8
Parts = list[tuple[str, Box, np.ndarray]]  # a rank's boxes of tensors


@dataclass
class Run:
    """A job on a rank: by step what is logged and the gradients, and the adapters at its end."""

    metrics: list[dict[str, float]] = field(default_factory=list)
    gradients: list[Parts] = field(default_factory=list)
    weights: Parts = field(default_factory=list)


def _parts(context: Context, value_of: Callable[[torch.Tensor], torch.Tensor]) -> Parts:
    """This rank's boxes of its adapters, or of what ``value_of`` finds at them."""
    return [
        (piece.tensor, piece.box, value_of(value)[slices(piece.place)].detach().numpy().copy())
        for chunk in context.chunks
        for parameter, value in parameters_of(chunk, context.spec)
        if is_adapter(parameter.name)
        for piece in parameter.pieces
    ]


def _runs(rank: int, world_size: int, folder: Path, case: str, names: Sequence[str]) -> list[Run]:
    return [_run(World(rank, world_size, torch.device("cpu")), folder, case, n) for n in names]


def _run(world: World, folder: Path, case: str, name: str) -> Run:
    lora = {**CASES[case][2], "path": str(folder / "adapters")}
    lora["target_modules"] = list(lora["target_modules"])
    config = load_job(
        JOB,
        [
            f"actor.model.path={folder}/base",
            f"actor.lora={json.dumps(lora)}",
            f"data.train={folder}/pairs.jsonl",
            f"output_dir={folder}/out",
            *PLANS[name][1],
        ],
    )
    assert not problems_of(config, world.size)
    run, plain_step = Run(), Optimizer.step

    def step(self: Optimizer, *args: Any) -> tuple[bool, float]:
        run.gradients.append(_parts(self.context, lambda p: p.main_grad))  # type: ignore[attr-defined]
        return plain_step(self, *args)

    with mock.patch.object(Optimizer, "step", step):
        trainer = DPOTrainer(resolved(config, world.size), world)
        run.metrics = [trainer.train_step(number)[0] for number in range(STEPS)]
    run.weights = _parts(trainer.models["actor"].context, lambda p: p)
    return run


def _whole(spec_shapes: Mapping[str, tuple[int, ...]], ranks: Iterator[Parts]) -> dict[str, Any]:
    """Whole tensors of all ranks' boxes; replicas must agree."""
    whole = {name: np.full(shape, np.nan) for name, shape in spec_shapes.items()}
    for parts in ranks:
        for name, box, values in parts:
            place = whole[name][slices(box)]
            seen = ~np.isnan(place)
            np.testing.assert_allclose(place[seen], values[seen], rtol=1e-5, atol=1e-8)
            whole[name][slices(box)] = values
    assert not any(np.isnan(tensor).any() for tensor in whole.values())
    return whole


def _assert_close(found: Mapping[str, np.ndarray], wanted: Mapping, bound: float) -> None:
    assert found.keys() == wanted.keys()
    for name, (norm, *products) in wanted.items():
        sums = sums_of(found[name])
        assert sums[0] == pytest.approx(norm, rel=bound), name
        assert sums[1:] == pytest.approx(products, abs=bound * norm), name


@pytest.fixture(scope="module")
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    """A case's name, its folder, and the shapes of its adapters."""
    folder = tmp_path_factory.mktemp("lora")
    save_base(folder / "base", request.param)
    save_adapters(folder / "adapters", request.param)
    lines = [json.dumps(pair) for pair in pairs()]
    (folder / "pairs.jsonl").write_text("\n".join(lines))
    return request.param, folder


def _spec(folder: Path, case: str) -> ModelSpec:
    lora = {k: v for k, v in CASES[case][2].items() if k != "target_modules"}
    lora["target_modules"] = list(CASES[case][2]["target_modules"])
    given = [f"actor.model.path={folder}/base", f"actor.lora={json.dumps(lora)}"]
    return resolved(load_job(JOB, given)).models["actor"].spec


@pytest.mark.parametrize(
    ("case", "plans"),
    [
        ("llama", ["one"]),
        ("llama", ["P2", "D2"]),
        ("qwen3", ["one"]),
        # Others have each part of them: the model, an axis; test_plans_agree.py has tensor ranks.
        pytest.param("llama", ["T2"], marks=pytest.mark.slow),
        pytest.param("llama", ["P2 T2 sp"], marks=pytest.mark.slow),
        pytest.param("qwen3", ["P2", "D2", "T2"], marks=pytest.mark.slow),
        pytest.param("qwen3", ["P2 T2 sp"], marks=pytest.mark.slow),
    ],
    ids=str,
    indirect=["case"],
)
def test_eight_steps_are_trl_s(case: tuple[str, Path], plans: list[str]) -> None:
    name, folder = case
    spec_shapes = adapter_shapes(_spec(folder, name))
    found = run_ranks(_runs, PLANS[plans[0]][0], folder, name, plans)
    wanted, start = TRL[name], adapters(name)
    for place in range(len(plans)):
        runs: list[Run] = [of_rank[place] for of_rank in found]
        for step, expected in enumerate(wanted["steps"]):
            metrics, logged = runs[0].metrics[step], expected["logged"]
            assert metrics["loss"] == pytest.approx(expected["loss"], rel=BOUND)
            for key in SAME:
                assert metrics[key] == pytest.approx(logged[key], rel=BOUND, abs=BOUND), key
            gradients = _whole(spec_shapes, (run.gradients[step] for run in runs))
            _assert_close(gradients, expected["gradients"], BOUND)
        weights = _whole(spec_shapes, (run.weights for run in runs))
        _assert_close(weights, wanted["weights"], BOUND)
        moves = {key: weight - start[key] for key, weight in weights.items()}
        _assert_close(moves, wanted["moves"], MOVE_BOUND)
