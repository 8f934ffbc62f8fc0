"""The page of metrics names every metric that the code writes; recipes' files are sound."""

import re
from itertools import chain
from pathlib import Path

import torch
import yaml

from puzzle_align.telemetry import StepStats
from puzzle_align.telemetry.ppo_metrics import (
    SUMS,
    function_metrics,
    rollout_metrics,
    sampling_metrics,
    spread_of,
)
from puzzle_align.telemetry.preference_metrics import (
    NAMES,
    TOKEN_NAMES,
    summarize_responses,
    summarize_rewards,
)
from puzzle_align.telemetry.throughput import rates

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
SOURCES = ("stages/rl/learning.py", "stages/ppo.py", "algos/ppo.py", "telemetry/ppo_metrics.py")


def written() -> set[str]:
    """Names of metrics: from the functions that make them, and from literals in PPO's sources."""
    responses = torch.tensor([[0.1, 1, 0, 0.5, -1, 2, 3, 4], [0.1, 0, 0, 0.5, -1, 2, 3, 4]])
    stats = StepStats(
        seconds=1.0,
        num_pairs=1,
        num_responses=1,
        num_tokens=1,
        num_row_tokens=2,
        num_flops=1.0,
        phases={"generate": 0.5},
    )
    made = chain(
        NAMES,
        TOKEN_NAMES,
        summarize_rewards(torch.ones(2, 3)),
        summarize_responses(responses.double()),
        rollout_metrics(torch.ones(len(SUMS)).double()),
        function_metrics(["NAME"], torch.ones(2, 1)),
        sampling_metrics(*[[spread_of(torch.ones(1))]] * 2),
        rates(stats, 1.0),
    )
    literals = "".join((ROOT / "puzzle_align" / name).read_text() for name in SOURCES)
    found = re.findall(
        r'"((?:objective|policy|val|loss|completions|clip_ratio|filter_groups)/[a-z_]+)"', literals
    )
    others = ("num_tokens", "grad_norm", "learning_rate", "peak_memory")
    return {*made, *found, *others, "host_waits", "compilations"}


def test_every_metric_is_on_the_page() -> None:
    names = written()
    assert len(names) >= 49
    page = PAGE.replace("time/PHASE", "time/generate")
    assert [name for name in sorted(names) if f"`{name}`" not in page] == []


def test_the_job_for_kubernetes_is_one() -> None:
    text = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    job = yaml.safe_load(block)
    master, worker = (job["spec"]["pytorchReplicaSpecs"][name] for name in ("Master", "Worker"))
    # The operator sets MASTER_ADDR only for a job with a master.
    assert master["replicas"] == 1 and master["template"] == worker["template"]
    (container,) = worker["template"]["spec"]["containers"]
    (line,) = container["args"]
    assert (job["kind"], container["name"]) == ("PyTorchJob", "pytorch")
    gpus = container["resources"]["limits"]["nvidia.com/gpu"]
    assert f"NNODES={1 + worker['replicas']} NPROC={gpus} HEAD=$MASTER_ADDR:" in line
    assert "launch/multi_node.sh" in line
    mounted = {mount["name"] for mount in container["volumeMounts"]}
    assert mounted == {volume["name"] for volume in worker["template"]["spec"]["volumes"]}
