"""Every CPU patch is needed, and together they suffice: training and checkpoints without each.

Every case is a process of its own that has imported Megatron-core, as where Transformer Engine is
installed, and installs the other patches.
"""

import os
import signal
import traceback
from inspect import getsource
from pathlib import Path

import pytest
import torch
from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from puzzle_align.config.saved import open_checkpoint
from puzzle_align.config.sections.optimizer import OptimizerConfig
from puzzle_align.layout.plan import ParallelPlan
from puzzle_align.layout.rows import RowLayout, Segment, position_ids, predictions
from puzzle_align.models.attention import prepare_attention
from puzzle_align.models.cpu import PATCHES, install_cpu_patches
from puzzle_align.models.inputs import Predictions
from puzzle_align.runtime.checkpoint.models import Trained, load_checkpoint, save_checkpoint
from puzzle_align.runtime.context import Context
from puzzle_align.runtime.groups.world import World
from puzzle_align.runtime.optimizer.optimizer import Optimizer
from puzzle_align.runtime.optimizer.state import parts_of
from tests.dist.random_models import random_context, trainable
from tests.dist.spawn import run_alone
from tests.specs import TINY

# From Megatron-core 0.17 on.
SYNC_ASKS_FOR_THE_STREAM = "current_stream" in getsource(_ParamAndGradBucketGroup.start_grad_sync)
LAYOUT = RowLayout(8, (Segment(0, 3, (2, 2)),))
NEEDED_FOR = {
    "current_device": "train",
    "current_stream": "train",
    "rng_states": "train",
    "optimizer_literals": "train",
    "fused_kernels": "train",
    "tensor_cuda": "gather",
}


@pytest.mark.parametrize("workload", ["train", "resume", "gather"])
def test_the_patches_suffice(workload: str, tmp_path: Path) -> None:
    assert run_alone(_outcome, None, workload, tmp_path) == "ok"


def test_every_patch_has_a_case() -> None:
    assert set(NEEDED_FOR) == set(PATCHES)


@pytest.mark.parametrize("name", NEEDED_FOR)
def test_patch_is_needed(name: str, tmp_path: Path) -> None:
    outcome = run_alone(_outcome, name, NEEDED_FOR[name], tmp_path)
    if name == "current_stream" and not SYNC_ASKS_FOR_THE_STREAM:
        assert outcome == "ok"
        return
    assert "torch.cuda" in outcome or "torch/cuda" in outcome


def _pretend_fused_kernels() -> None:
    """Set what Megatron's optimizers import to what it is where Transformer Engine is installed."""
    from megatron.core import optimizer
    from megatron.core.optimizer import clip_grads, distrib_optimizer
    from megatron.core.optimizer import optimizer as optimizer_base

    optimizer.Adam = distrib_optimizer.Adam = _FusedAdam
    optimizer.USING_PYTORCH_OPTIMIZER = False
    distrib_optimizer.HAVE_APEX_OR_TE = distrib_optimizer.USING_TE_OPTIMIZER = True
    for module in (optimizer_base, clip_grads):
        module.multi_tensor_applier = module.multi_tensor_scale_impl = _fused
    clip_grads.l2_norm_impl = _fused


class _FusedAdam(torch.optim.Optimizer):
    def __init__(self, *args, **kwargs):
        _fused()


def _fused(*args, **kwargs):
    raise RuntimeError("a fused kernel needs torch.cuda")


def _outcome(left_out: str | None, workload: str, folder: Path) -> str:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    signal.signal(signal.SIGALRM, _time_out)
    signal.alarm(60)
    store = torch.distributed.FileStore(str(folder / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    _pretend_fused_kernels()
    try:
        if left_out is not None:
            PATCHES.pop(left_out)
        install_cpu_patches()
        {"train": _train, "resume": _resume, "gather": _gather}[workload](folder)
    except Exception:  # noqa: BLE001 - the failure is the result
        return traceback.format_exc()
    return "ok"


def _time_out(*_args: object) -> None:
    raise TimeoutError("the workload hangs")


def _train(_folder: Path):
    """One optimizer step with recompute and clipping; returns the context and its optimizer."""
    world = World(0, 1, torch.device("cpu"))
    context = random_context(TINY, ParallelPlan(), world, seed=0, dtype="bf16", recompute="full")
    optimizer = trainable(context, OptimizerConfig(lr=0.1, use_distributed_optimizer=True))
    tokens = torch.arange(8)[None]
    source, target = (torch.from_numpy(x) for x in predictions(LAYOUT)[:2])
    context.chunks[0].row_state.current = prepare_attention(LAYOUT, "segments", torch.device("cpu"))
    positions = torch.from_numpy(position_ids(LAYOUT))[None]
    log_probs = context.modules[0](tokens, positions, Predictions(source, tokens[0, target]))
    log_probs.sum().backward()
    optimizer.reduce_gradients()
    assert optimizer.step(0.1)[0]
    return context, optimizer


def _gather(folder: Path) -> None:
    """Bring a distributed optimizer's state together, as a save of several replicas does."""
    _, optimizer = _train(folder)
    (part,) = parts_of(optimizer.megatron)
    assert isinstance(part, DistributedOptimizer)
    part.get_parameter_state_dp_zero(use_gloo_comm=False)


def _resume(folder: Path) -> None:
    """Save weights and optimizer state after a step, change them, and load them again."""
    context, optimizer = _train(folder)
    models, before = {"actor": Trained(context, optimizer)}, _numbers(context, optimizer)
    path = save_checkpoint(folder, 1, {}, models)
    saved = [value.clone() for value in before]
    with torch.no_grad():
        for value in before:
            value.fill_(7)
    load_checkpoint(open_checkpoint(path), models)
    for value, expected in zip(_numbers(context, optimizer), saved, strict=True):
        assert torch.equal(value, expected)


def _numbers(context: Context, optimizer: Optimizer) -> list[torch.Tensor]:
    """Weights, and the state of their optimizer: steps, too."""
    (part,) = parts_of(optimizer.megatron)
    state = [state[name] for state in part.optimizer.state.values() for name in sorted(state)]
    assert len(state) == 3 * len([*context.chunks[0].parameters()])
    return [*context.chunks[0].parameters(), *state]
