"""Whole steps of the 7B configs on a CUDA device that is not there: devices, dtypes, host waits.

Real widths, one layer a rank or two, Megatron-core's own layers in place of Transformer Engine's.
"""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from puzzle_align.algos.logprobs import logits_of
from puzzle_align.config.load import load_file
from puzzle_align.config.resolve import resolve
from puzzle_align.config.saved import open_checkpoint
from puzzle_align.runtime.checkpoint.models import load_checkpoint, save_checkpoint
from puzzle_align.runtime.generation.step_graphs import StepGraphs
from puzzle_align.runtime.groups.world import World
from puzzle_align.runtime.optimizer.adamw import PieceAdamW, _kernel
from puzzle_align.runtime.optimizer.state import allocate_state, parts_of
from puzzle_align.stages import dpo, models, ppo
from puzzle_align.stages.engine import resolve_engine
from tests.dist.fake_cuda import CUDA, FakeCuda, compile_guard, install
from tests.dist.spawn import run_alone, run_ranks

CONFIGS = Path(__file__).parents[2] / "configs"
COMMON = (
    "engine.transformer_impl=local",
    "actor.model.config.num_hidden_layers=2",
    "data.num_synthetic=64",
    "global_batch_size=16",
)
PIPELINE = ("actor.parallel.pipeline_model_parallel_size=2",)
OFFLOAD = (  # to real memory: a small model
    "optimizer.cpu_offload=true",
    "actor.model.config.num_hidden_layers=1",
    "actor.model.config.intermediate_size=1024",
    "actor.model.config.vocab_size=1024",
)
SHORT = (  # responses
    "reward.model.config.num_hidden_layers=2",
    "engine.attention=segments",
    "data.synthetic_length=64",
    "generation.max_new_tokens=12",
    "generation.decode_batch_size=4",
)


class Unread:
    """Weights that are not loaded."""

    def fill(self, _chunk: object, _lent: object) -> None:
        pass


@pytest.fixture(scope="module")
def guard(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compile_guard(tmp_path_factory.mktemp("guard"))


def opened(
    guard: Path, name: str, rank: int, world_size: int, folder: str, *overrides: str
) -> tuple[FakeCuda, Any]:
    """A rank's trainer, and the mode to run it in."""
    mode = install(rank, world_size, guard)
    models.role_weights = lambda *_args: Unread()  # type: ignore[assignment]
    config = load_file(CONFIGS / name, [f"output_dir={folder}", *COMMON, *overrides])
    job = resolve(config, resolve_engine(config.engine, elsewhere=True), world_size)
    open_trainer = {"dpo": dpo, "ppo": ppo}[config.stage].open_trainer
    with mode:
        assert _kernel(CUDA) is not None, "AdamW would run as separate kernels"
        trainer = open_trainer(job, World(rank, world_size, CUDA))
        for optimizer in trainer.run.optimizers.values():
            allocate_state(optimizer.megatron)  # else in the first step, which would wait
    return mode, trainer


def waits_of_a_step(guard: Path, name: str, rank: int, world_size: int, *overrides: str) -> int:
    """Times that the host waits for the device in a rank's first step."""
    with tempfile.TemporaryDirectory() as folder:
        mode, trainer = opened(guard, name, rank, world_size, folder, *overrides)
        before = mode.waits
        with mode:
            trainer.train_step(0)
        waits = mode.waits - before
        for optimizer in trainer.run.optimizers.values():
            for part in parts_of(optimizer.megatron):
                if isinstance(part.optimizer, PieceAdamW):  # its kernel clips to a norm of 1
                    assert part.optimizer.scale == 1 / (1 + 1e-6), "the norm reads 1"
                else:
                    assert all(group["fused"] for group in part.optimizer.param_groups)
    return waits


@pytest.mark.parametrize(
    ("config", "rank", "world_size", "overrides"),
    [
        pytest.param("dpo_7b.yaml", 0, 8, PIPELINE, marks=pytest.mark.slow),  # first pipeline rank
        ("dpo_7b.yaml", 7, 8, PIPELINE),  # the last
        ("dpo_7b_1gpu.yaml", 0, 1, (*OFFLOAD, "optimizer.cpu_offload=false")),
        # Gemma does all of this, and multiplies embeddings.
        pytest.param("dpo_7b_1gpu.yaml", 0, 1, OFFLOAD, marks=pytest.mark.slow),
        ("dpo_7b_1gpu.yaml", 0, 1, (*OFFLOAD, "actor.model.config.model_type=gemma")),
        ("dpo_7b_1gpu.yaml", 0, 1, (*OFFLOAD, "actor.lora={r: 4, lora_dropout: 0.1}")),
    ],
)
def test_a_step_of_dpo_reads_the_norm_and_the_metrics(
    guard: Path, config: str, rank: int, world_size: int, overrides: tuple[str, ...]
) -> None:
    assert run_alone(waits_of_a_step, guard, config, rank, world_size, *overrides) == 2


def waits_of_a_rank(rank: int, world_size: int, guard: Path, *overrides: str) -> int:
    """Times that the host waits for the device in the first iteration of a rank of ppo_7b."""
    capture, captured = StepGraphs._captured, list[Any]()

    def noted(self: StepGraphs, step: Callable[[], object]) -> torch.cuda.CUDAGraph:
        captured.append(step)
        return capture(self, step)

    StepGraphs._captured = noted  # type: ignore[method-assign]
    waits = waits_of_a_step(guard, "ppo_7b.yaml", rank, world_size, *overrides)
    assert captured, "decode steps are launched kernel by kernel"
    return waits


@pytest.mark.parametrize(
    ("pipeline", "tensor"),
    [
        # All that it does the other case does as well.
        pytest.param(1, 1, marks=pytest.mark.slow),
        (2, 2),  # as shipped: only sampling is under T=1
    ],
)
def test_an_iteration_of_ppo_reads_its_responses_and_what_scores_them(
    guard: Path, pipeline: int, tensor: int
) -> None:
    """Eight responses a rank: four prompts at a time, one token at their prefill, then 8 and 3."""
    world_size = pipeline * tensor
    plan = (
        f"engine.world_size={world_size}",
        f"global_batch_size={8 * world_size}",
        f"actor.parallel.pipeline_model_parallel_size={pipeline}",
        f"actor.parallel.tensor_model_parallel_size={tensor}",
        f"actor.parallel.sequence_parallel={str(tensor > 1).lower()}",
    )
    shadow = int(world_size > 1)  # the model that samples is built in the first iteration
    generation = (8 // 4) * (1 + 2)
    scores = 4  # log-probabilities of actor and reference, values, rewards
    updates = 4 * (2 + 1)  # of mini-batches: two models' norms, and the metrics
    expected = [shadow + generation + updates] * world_size
    expected[(pipeline - 1) * tensor] += scores  # the first tensor rank of the last pipeline rank
    assert run_ranks(waits_of_a_rank, world_size, guard, *SHORT, *plan) == expected


def devices_of_a_save(
    rank: int, world_size: int, guard: Path, folder: Path, *overrides: str
) -> set[str]:
    """Devices from which optimizer state is gathered; the run goes on from the checkpoint."""
    small = (*OFFLOAD, "actor.model.config.hidden_size=512", *overrides)
    mode, trainer = opened(guard, "dpo_7b_1gpu.yaml", rank, world_size, str(folder), *small)
    gather, devices = dist.gather, set[str]()

    def noted(piece: torch.Tensor, *others: Any) -> Any:
        devices.add(str(piece.device))
        return gather(piece, *others)

    dist.gather = noted
    with mode:
        trainer.train_step(0)
        path = save_checkpoint(folder, 1, {"starts": {}}, trainer.models)
        load_checkpoint(open_checkpoint(path), trainer.models)
        trainer.train_step(1)
    return devices


@pytest.mark.parametrize("state", ["bf16", "fp32"])
def test_a_checkpoint_s_state_is_gathered_by_the_device(
    guard: Path, state: str, tmp_path: Path
) -> None:
    state_of_host = (f"optimizer.state_dtype={state}", f"optimizer.cpu_offload={state == 'bf16'}")
    found = run_ranks(devices_of_a_save, 1, guard, tmp_path, *map(str.lower, state_of_host))
    assert found == [{"cuda:0"}]


class Products(TorchDispatchMode):
    """Notes the dtypes of matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: list[torch.dtype] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func.overloadpacket is torch.ops.aten.mm:
            self.dtypes.append(made.dtype)
        return made


def errors_of_wrong_work(mode: FakeCuda) -> list[str]:
    """The errors of operations that a GPU refuses; the waits of some that it allows."""
    said = []
    with mode:
        x, weight = torch.ones(4, 4, device=CUDA), torch.ones(4, 4)
        for wrong in (
            lambda: x + weight,
            lambda: x @ weight,
            lambda: x.index_select(0, torch.tensor([1])),
            lambda: x @ x.bfloat16(),
            lambda: torch.nn.functional.embedding(torch.tensor([1]), x),
        ):
            try:
                wrong()
            except (RuntimeError, TypeError) as error:
                said.append(str(error))
        assert mode.waits == 0
        _ = weight[0] * 2, x.to(CUDA), x.float(), weight.to(CUDA, non_blocking=True)
        assert mode.waits == 0
        _ = x.sum().item(), x.cpu(), x.tolist(), weight.copy_(x)
        assert mode.waits == 1 + 1 + 16 + 1  # a list is read number by number
    return said


def dtypes_of_logits(mode: FakeCuda) -> list[torch.dtype]:
    """Of a bf16 model's logits, as their product and at their end."""
    with mode, Products() as products:
        hidden, weight = (torch.ones(4, 4, device=CUDA, dtype=torch.bfloat16) for _ in range(2))
        return [logits_of(hidden, weight).dtype, *products.dtypes]


def errors_and_dtypes(guard: Path) -> tuple[list[str], list[torch.dtype]]:
    mode = install(0, 1, guard)
    return errors_of_wrong_work(mode), dtypes_of_logits(mode)


def test_wrong_work_is_refused_waits_are_counted_and_logits_are_not_rounded(
    guard: Path,
) -> None:
    (*devices, dtypes, last), of_logits = run_alone(errors_and_dtypes, guard)
    assert len(devices) == 3 and all("device" in line for line in (*devices, last))
    assert "dtype" in dtypes
    assert of_logits == [torch.float32] * 2
