"""On a GPU: the tiny jobs have the CPU's numbers, and a 1B-shaped model trains in bf16.

The longest come first, so that what runs them beside others is not left with one at the end.

python -m pytest -m "gpu and not slow"
python -m pytest -m "gpu and slow"    # two ranks on one GPU
"""

import importlib.util
import json
import math
import shutil
from pathlib import Path

import pytest
import torch

from tests.e2e.launch import torchrun
from tests.jobs import parallel
from tests.metrics import records

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.timeout(900),
]
NUM_STEPS = 50
ONE_BILLION = {  # Llama-3.2-1B's shape
    "model_type": "llama",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 128256,
    "max_position_embeddings": 4096,
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
}
IN_BF16 = (
    *("engine.device=cuda", "engine.dtype=bf16", f"actor.model.config={json.dumps(ONE_BILLION)}"),
    "engine.attention=flex",  # auto times backends, and runs may differ in their choice
    *("packing.row_tokens=2048", "optimizer.lr=1e-5", "optimizer.use_distributed_optimizer=true"),
)
DPO = (
    *("--config", "dpo_tiny", "max_steps=4", "global_batch_size=16", "data.num_synthetic=200"),
    *("telemetry.log_every=1", "checkpoint.save_every=0"),
)
PPO = (
    *("--config", "ppo_tiny", "max_steps=3"),
    *("generation.temperature=0", "generation.num_generations=1"),
)
SHARDS = ("optimizer.use_distributed_optimizer=true", "optimizer.overlap_grad_reduce=true")
SWITCH = ("generation.overlap_switch=true", "generation.offload_optimizer=true")
TWO_RANKS = {
    "pipeline": (DPO, parallel("actor", P=2)),
    "chunks": (DPO, parallel("actor", P=2, V=2)),
    "tensor": (DPO, parallel("actor", T=2, sp=True)),
    "data": (DPO, [*parallel("actor", D=2), *SHARDS]),
    "switch": (PPO, [*parallel("actor", P=2), *parallel("generation", T=2), *SWITCH]),
    "replicas": (PPO, [*parallel("actor", D=2), *parallel("generation", P=2), *SHARDS, *SWITCH]),
}
NUMBERS = {"loss", "rewards/margins", "grad_norm", "eval_loss"}
NUMBERS |= {"objective/scores", "objective/entropy", "loss/value_avg", "val/ratio"}


def _records(output_dir: Path, *overrides: str) -> list[dict[str, float]]:
    arguments = ("--config", "dpo_tiny", f"output_dir={output_dir}", "telemetry.log_every=1")
    done = torchrun(*arguments, *overrides, ranks=1, timeout=600)
    assert done.returncode == 0, done.stderr
    shutil.rmtree(output_dir / "checkpoints")  # of a billion parameters it takes 17 GB
    return [record for record in records(output_dir) if "loss" in record]


def _losses(output_dir: Path, *overrides: str) -> list[float]:
    return [record["loss"] for record in _records(output_dir, *overrides)]


def test_small_state_and_state_on_the_host_take_less_memory(tmp_path: Path) -> None:
    """Moments and main weights take 12 bytes a parameter, 6, or none on the device."""
    runs = {
        name: _records(
            tmp_path / name,
            "max_steps=4",
            *IN_BF16,
            "optimizer.overlap_grad_reduce=true",
            *(f"optimizer.{key}" for key in own),
        )
        for name, own in {
            "plain": (),
            "small": ("state_dtype=bf16",),
            "host": ("cpu_offload=true",),
            "small_host": ("state_dtype=bf16", "cpu_offload=true"),
        }.items()
    }
    losses = {name: [record["loss"] for record in run] for name, run in runs.items()}
    assert losses["small"] == losses["small_host"]
    for name in ("small", "host"):
        assert losses[name] == pytest.approx(losses["plain"], rel=1e-2)
    peaks = {name: run[-1]["peak_memory"] for name, run in runs.items()}
    number = 1_235_814_400
    for name, saved in (("small", 6), ("host", 12), ("small_host", 12)):
        assert peaks["plain"] - peaks[name] > 0.8 * saved * number, (name, peaks)


def test_a_model_of_one_billion_parameters_trains_in_bf16(tmp_path: Path) -> None:
    losses = _losses(tmp_path, "max_steps=20", *IN_BF16)
    assert losses[0] == pytest.approx(math.log(2), abs=1e-2)
    assert sum(losses[-5:]) / 5 < losses[0]


def test_ppo_has_the_numbers_of_the_cpu(tmp_path: Path) -> None:
    _compare(tmp_path, PPO, "engine.attention=flex")


@pytest.mark.slow  # its ranks take turns on the device: other tests beside them would add theirs
@pytest.mark.parametrize("name", TWO_RANKS)
def test_two_ranks_of_one_gpu_have_the_numbers_of_one_on_the_cpu(name: str, tmp_path: Path) -> None:
    """All transfers are NCCL's, through sockets."""
    job, plan = TWO_RANKS[name]
    _compare(tmp_path, job, "engine.attention=dense", *plan, ranks=2)


def _compare(path: Path, job: tuple[str, ...], *on_cuda: str, ranks: int = 1) -> None:
    """Run a job on one CPU rank, and on ``ranks`` of one GPU: the numbers are the same."""
    runs = {}
    for device, own in (("cpu", ()), ("cuda", ("engine.dtype=fp32", *on_cuda))):
        folder, number = path / device, 1 if device == "cpu" else ranks
        arguments = (*job, f"output_dir={folder}", f"engine.device={device}", *own)
        done = torchrun(*arguments, ranks=number, timeout=600, on_one_gpu=number > 1)
        assert done.returncode == 0, done.stderr
        runs[device] = records(folder)
    for on_cpu, on_gpu in zip(runs["cpu"], runs["cuda"], strict=True):
        compared = NUMBERS.intersection(on_cpu)
        assert compared
        for name in compared:
            assert on_gpu[name] == pytest.approx(on_cpu[name], rel=1e-3, abs=1e-4), name


@pytest.fixture(scope="module")
def cpu_losses(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    return _losses(tmp_path_factory.mktemp("cpu"), f"max_steps={NUM_STEPS}")


@pytest.mark.parametrize("implementation", ["local", "te"])
def test_has_the_loss_curve_of_the_cpu(
    implementation: str, cpu_losses: list[float], tmp_path: Path
) -> None:
    if implementation == "te" and importlib.util.find_spec("transformer_engine") is None:
        pytest.skip("Transformer Engine is not installed")
    losses = _losses(
        tmp_path,
        f"max_steps={NUM_STEPS}",
        "engine.device=cuda",
        "engine.dtype=fp32",
        "engine.attention=flex",
        f"engine.transformer_impl={implementation}",
    )
    assert losses[0] == pytest.approx(math.log(2), abs=1e-6)
    assert losses == pytest.approx(cpu_losses, abs=1e-3)
