"""KTO on one and two ranks against KTO as one reads it in the paper, in float64."""

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from puzzle_align.commands.prepare import pack_data
from puzzle_align.config.job import JobConfig
from puzzle_align.config.load import load_job
from puzzle_align.layout.flops import attention_flops, flops_per_token, head_flops_per_token
from puzzle_align.layout.hf_config import from_hf_config, read_hf_config
from puzzle_align.layout.model import ModelSpec
from puzzle_align.runtime.groups.world import World
from puzzle_align.stages.kto import open_trainer
from tests.dist.spawn import asked, run_ranks
from tests.jobs import resolved
from tests.specs import hf_llama

NUM_STEPS, BATCH, NUM_HELD_OUT = 3, 6, 7
EVALUATED = (0, 2)  # before these steps, and after the last
BETA, DESIRABLE, UNDESIRABLE, LR = 0.4, 1.5, 0.75, 3e-3
WORDS = ["the", "sky", "is", "blue", "and", "what", "a", "sea", "green", "of", "colour"]
METRICS = (
    "loss",
    "kl",
    "grad_norm",
    "flops",
    "responses",
    "logps/chosen",
    "logps/rejected",
    "rewards/margins",
)
SEED = 11
JOB = f"""
stage: kto
seed: {SEED}
global_batch_size: {BATCH}
max_steps: {NUM_STEPS}
engine: {{device: cpu}}
tokenizer: {{path: byte}}
data: {{shuffle: false, max_length: 64}}
packing: {{row_tokens: 128}}
kto: {{beta: {BETA}, desirable_weight: {DESIRABLE}, undesirable_weight: {UNDESIRABLE}}}
optimizer: {{lr: {LR}, lr_scheduler_type: constant, adam_beta2: 0.999, max_grad_norm: 1.0}}
telemetry: {{progress: false}}
"""
SHORT = "data.max_length=37"
P2 = "actor.parallel.pipeline_model_parallel_size=2"
T2 = "actor.parallel.tensor_model_parallel_size=2"
RUNS = {
    "D2": (),
    "D2, no token metrics": ("telemetry.token_metrics=false",),
    "P2": (P2, "placement.reference=sequential"),
    "P2, reference ahead": (P2, "placement.reference=time_shared"),
    "P2, chunks": (P2, "actor.parallel.virtual_pipeline_model_parallel_size=2"),
    "T2": (T2, "packing.layout=paired"),
    "T2, sequence parallel, padded": (
        T2,
        "actor.parallel.sequence_parallel=true",
        "packing.layout=padded",
    ),
    "P2, reference T2": (P2, "reference.parallel.tensor_model_parallel_size=2"),
    "reference beside": (
        "placement.reference=concurrent",
        "reference.parallel.data_parallel_size=1",
    ),
}


# Whose steps have other responses together than the plain run's.
OTHER_BATCHES = {
    "dataset scope": ("packing.scope=dataset", "data.eval=null"),
    "packed files": ("data.format=packed", "data.train=@/packed", "data.eval=null"),
    # Shorter than some prompts with other prompts' responses, which are cut.
    "short": ("packing.scope=dataset", "data.eval=null", SHORT),
    "short, packed": ("data.format=packed", "data.train=@/short", "data.eval=null", SHORT),
}


def _records(number: int, seed: int) -> list[dict[str, Any]]:
    draw = random.Random(seed)

    def text(low: int, high: int) -> str:
        return " ".join(draw.choice(WORDS) for _ in range(draw.randint(low, high)))

    return [
        {"prompt": f"{text(1, 4)} ", "completion": text(1, 4), "label": draw.random() < 0.5}
        for _ in range(number)
    ]


def _job(folder: Path, *overrides: str) -> JobConfig:
    keys = {
        "output_dir": folder / "out",
        "actor.model.path": folder / "actor",
        "reference.model.path": folder / "reference",
        "data.train": folder / "train.jsonl",
        "data.eval": folder / "eval.jsonl",
    }
    return load_job(JOB, [*(f"{name}={value}" for name, value in keys.items()), *overrides])


def _run(rank: int, world_size: int, folder: Path, names: list[str]) -> dict[str, Any]:
    world = World(rank, world_size, torch.device("cpu"))
    found = {}
    for name in names:
        own = (RUNS | OTHER_BATCHES)[name]
        job = _job(folder, *(key.replace("@", str(folder)) for key in own))
        trainer = open_trainer(resolved(job, world.size), world)
        evaluated = []
        steps = []
        for step in range(NUM_STEPS):
            if step in EVALUATED:
                evaluated.append(trainer.evaluate())
            metrics, stats = trainer.train_step(step)
            work = {"flops": stats.num_flops, "responses": stats.num_responses}
            steps.append({**metrics, **work})
            assert stats.num_pairs == 0
            assert [*stats.phases] == ["kl", "train"]
            assert stats.seconds == pytest.approx(sum(stats.phases.values()))
        found[name] = steps, [*evaluated, trainer.evaluate()]
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("kto")
    for name, seed in (("actor", 1), ("reference", 2)):
        torch.manual_seed(seed)
        sizes = {"num_hidden_layers": 4, "max_position_embeddings": 64}
        config = hf_llama(260, **sizes, initializer_range=0.1)
        LlamaForCausalLM(config).save_pretrained(folder / name)
    for name, number, seed in (("train", NUM_STEPS * BATCH, 3), ("eval", NUM_HELD_OUT, 4)):
        lines = (json.dumps(record) for record in _records(number, seed))
        (folder / f"{name}.jsonl").write_text("\n".join(lines))
    pack_data(_job(folder), folder / "packed")
    pack_data(_job(folder, SHORT), folder / "short")
    return folder


@pytest.fixture(scope="module")
def ranks(folder: Path, request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    names = asked(request, "name") | asked(request, "other")
    return run_ranks(_run, 2, folder, [name for name in RUNS | OTHER_BATCHES if name in names])


@pytest.fixture(scope="module")
def plain(folder: Path) -> tuple[list[dict[str, float]], list[dict[str, float]]]:
    """Metrics of every step, and of the held-out responses."""
    policy, reference = (
        AutoModelForCausalLM.from_pretrained(folder / name, dtype=torch.float64).eval()
        for name in ("actor", "reference")
    )
    adam = torch.optim.AdamW(policy.parameters(), LR, (0.9, 0.999), 1e-8, weight_decay=0.0)
    spec = from_hf_config(read_hf_config(folder / "actor"), "")
    steps, held_out, train = [], [], _records(NUM_STEPS * BATCH, 3)
    for step in range(NUM_STEPS):
        if step in EVALUATED:
            held_out.append(_evaluated(policy, reference))
        adam.zero_grad()
        batch = train[step * BATCH : (step + 1) * BATCH]
        lines = _lines(policy, reference, batch)
        loss = torch.stack([line["loss"] for line in lines]).mean()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        adam.step()
        # Both models over the mismatched and their own rows, and the policy's backward.
        work = {"flops": (2 + 2 + 2) * _forward_flops(spec, batch), "responses": BATCH}
        steps.append({**_means(lines), "grad_norm": norm.item(), **work})
    return steps, [*held_out, _evaluated(policy, reference)]


def _forward_flops(spec: ModelSpec, records: list[dict[str, Any]]) -> int:
    flops = 0
    for record in records:
        prompt, response = 1 + len(record["prompt"]), len(record["completion"]) + 1
        whole = prompt + response
        flops += whole * flops_per_token(spec) + response * head_flops_per_token(spec)
        flops += attention_flops(spec, whole * (whole + 1) // 2)
    return flops


def _evaluated(policy: Any, reference: Any) -> dict[str, float]:
    """Metrics of the held-out records in an epoch's order, seven in batches of six and one."""
    records = _records(NUM_HELD_OUT, 4)
    order = np.random.default_rng([SEED, 0]).permutation(NUM_HELD_OUT)
    lines = []
    with torch.no_grad():
        for first in range(0, NUM_HELD_OUT, BATCH):
            batch = [records[n] for n in order[first : first + BATCH]]
            lines += _lines(policy, reference, batch)
    return _means(lines)


def _lines(policy: Any, reference: Any, records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Loss, label, reward, log-probability and KL of every record of a batch."""
    kls = []
    with torch.no_grad():
        for number, record in enumerate(records):
            other = records[number - 1]["completion"]
            own, base = (_logp(model, record["prompt"], other) for model in (policy, reference))
            kls.append((own - base).item())
    kl = max(0.0, sum(kls) / len(kls))
    lines = []
    for record in records:
        logp = _logp(policy, record["prompt"], record["completion"])
        with torch.no_grad():
            ratio = logp.detach() - _logp(reference, record["prompt"], record["completion"])
        live = ratio + logp - logp.detach()
        if record["label"]:
            loss = DESIRABLE * (1 - torch.sigmoid(BETA * (live - kl)))
        else:
            loss = UNDESIRABLE * (1 - torch.sigmoid(BETA * (kl - live)))
        reward = BETA * ratio.item()
        kept = {"label": record["label"], "reward": reward, "logp": logp.item(), "kl": kl}
        lines.append({"loss": loss, **kept})
    return lines


def _logp(model: Any, prompt: str, completion: str) -> torch.Tensor:
    """Log-probability of the completion's bytes and the end of the sequence after the prompt's."""
    start, end = [257, *prompt.encode()], [*completion.encode(), 258]
    logits = model(torch.tensor([start + end])).logits[0, len(start) - 1 : -1]
    return logits.log_softmax(-1)[torch.arange(len(end)), torch.tensor(end)].sum()


def _means(lines: list[dict[str, Any]]) -> dict[str, float]:
    def mean(name: str, label: bool) -> float:
        values = [line[name] for line in lines if line["label"] == label]
        return sum(values) / len(values)

    return {
        "loss": sum(line["loss"].item() for line in lines) / len(lines),
        "kl": sum(line["kl"] for line in lines) / len(lines),
        "logps/chosen": mean("logp", True),
        "logps/rejected": mean("logp", False),
        "rewards/margins": mean("reward", True) - mean("reward", False),
    }


# Others have each part of them: a plan of the reference's own, a layout, pipeline and tensor ranks.
SLOW = ("P2", "P2, chunks", "T2, sequence parallel, padded", "P2, reference T2")
QUICK = [name for name in RUNS if name not in SLOW]
MORE = [pytest.param(name, marks=pytest.mark.slow) for name in SLOW]


@pytest.mark.parametrize("name", QUICK + MORE)
def test_every_plan_trains_as_plain_kto_does(ranks, plain, name: str) -> None:
    """Float32 against float64, over the series' largest value."""
    (steps, held_out), (expected, expected_held_out) = ranks[0][name], plain
    for metric in METRICS:
        values = [step[metric] for step in expected]
        largest = max(map(abs, values))
        assert [step[metric] for step in steps] == pytest.approx(values, abs=1e-5 * largest), metric
    assert len(held_out) == len(EVALUATED) + 1
    for own, expected_own in zip(held_out, expected_held_out, strict=True):
        for metric, value in expected_own.items():
            assert own[metric] == pytest.approx(value, rel=1e-5, abs=1e-5), metric


@pytest.mark.slow  # test_lookahead.py shows it of DPO
@pytest.mark.parametrize(("name", "other"), [("P2", "P2, reference ahead")])
def test_a_reference_that_runs_ahead_changes_no_bit(ranks, name: str, other: str) -> None:
    assert ranks[0][name] == ranks[0][other]


@pytest.mark.parametrize("name", ["P2, reference ahead"])
def test_every_rank_tells_the_same(ranks, name: str) -> None:
    assert ranks[0][name] == ranks[1][name]


@pytest.mark.parametrize(("name", "other"), [("D2", "D2, no token metrics")])
def test_token_metrics_change_no_other(ranks, name: str, other: str) -> None:
    for own, plain in zip(ranks[0][name][0], ranks[0][other][0], strict=True):
        assert plain.items() <= own.items()
        assert own.keys() - plain.keys() == {"entropy", "logits/chosen", "logits/rejected"}


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("short, packed", "short"),
        # Of the same kind, without what is cut.
        pytest.param("packed files", "dataset scope", marks=pytest.mark.slow),
    ],
)
def test_files_packed_offline_train_as_packed_here(ranks, name: str, other: str) -> None:
    assert ranks[0][name] == ranks[0][other]


@pytest.mark.parametrize(("name", "other"), [("short", "dataset scope")])
def test_a_shorter_limit_changes_responses(ranks, name: str, other: str) -> None:
    assert ranks[0][name] != ranks[0][other]
