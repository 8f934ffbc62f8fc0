"""Sizes of a GPU report, and its models with random weights and its rows."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, get_args

import torch
from bench_cases import SHAPES, make_loader, named_lengths, named_pairs
from dpo_steps import Bench, make_bench

from puzzle_align.config.sections.data import SYNTHETIC_LENGTHS
from puzzle_align.config.sections.engine import EngineConfig
from puzzle_align.config.sections.optimizer import OptimizerConfig
from puzzle_align.data.dataset import ExampleDataset
from puzzle_align.data.loader import plan_view
from puzzle_align.layout.model import AttentionBackend, ModelOptions, ModelSpec
from puzzle_align.layout.plan import ParallelPlan
from puzzle_align.layout.rows import Microbatch
from puzzle_align.runtime.batches import DataBatches
from puzzle_align.runtime.groups.world import World, init_distributed
from puzzle_align.runtime.moments import now
from puzzle_align.runtime.row_input import RowInput, to_device
from puzzle_align.stages.engine import resolve_engine
from report.process import free_device, one_line

HH = "hh_rlhf"
PLAN = ParallelPlan()
ALONE = plan_view(PLAN, 0)  # the only rank's view of a batch


@dataclass(frozen=True, kw_only=True)
class Setting:
    """The sizes of a whole report."""

    device: str
    spec: ModelSpec
    few_layers: int  # layers in parts that need no whole model
    tokens: int  # of a row
    rows: int  # of a step with shared prompts: about as many, or at least where layouts compare
    warmup: int
    steps: int
    layout_data: tuple[str, ...]  # data sets whose lengths are drawn, for layouts
    whole_data: tuple[str, ...]  # for the whole model: short and long ones, as many as a call takes
    bare_data: tuple[str, ...]  # for bare PyTorch's
    varied_batches: int
    loss_steps: int
    loss_job: tuple[str, ...]  # keys of the training whose losses are compared
    loss_attention: AttentionBackend  # named: "auto" may take another one in each precision
    new_tokens: int
    sequences: tuple[int, ...]
    matrix: int  # size of the products that show the ceiling
    test_files: str  # names of files that may hold tests of the GPU
    tried: Mapping[str, tuple[str, ...]]  # precisions whose loss is compared: keys of a training
    eager: Mapping[str, bool]  # ways to generate: whether without CUDA graphs

    def model(self) -> ModelSpec:
        """The model with the few layers."""
        return replace(self.spec, num_hidden_layers=self.few_layers)


FULL = Setting(
    device="cuda",
    spec=SHAPES["mistral7b"].spec,
    few_layers=8,
    tokens=8192,
    rows=8,
    warmup=1,
    steps=5,
    layout_data=tuple(SYNTHETIC_LENGTHS),
    whole_data=(HH, "metamath_dpo"),
    bare_data=(HH,),
    varied_batches=50,
    loss_steps=200,
    loss_job=(  # larger than dpo_tiny, for products that a GPU notices
        "actor.model.config.hidden_size=1024",
        "actor.model.config.intermediate_size=4096",
        "actor.model.config.num_attention_heads=16",
        "actor.model.config.num_key_value_heads=16",
        "optimizer.lr=1e-4",
    ),
    loss_attention="flex",
    new_tokens=128,
    sequences=(1, 32, 64),
    matrix=8192,
    test_files="test_*.py",
    tried={"bf16": ("engine.dtype=bf16",), "fp8": ("engine.dtype=bf16", "engine.fp8=hybrid")},
    eager={"eager": True, "graphs": False},
)
DRY = replace(
    FULL,
    device="cpu",
    spec=replace(SHAPES["tiny"].spec, hidden_size=64, intermediate_size=128, num_hidden_layers=2),
    few_layers=1,
    tokens=256,
    rows=1,
    steps=1,
    varied_batches=3,
    loss_steps=2,
    loss_job=("data.num_synthetic=256",),
    loss_attention="segments",
    new_tokens=4,
    sequences=(1, 3),
    matrix=128,
    test_files="test_attention_gpu.py",
    tried={"fp32": ("engine.dtype=fp32",), "bf16": ("engine.dtype=bf16",)},
    eager={"eager": True},
)


def chosen(setting: Setting, steps: int | None, data: Sequence[str] | None) -> Setting:
    """The setting with another number of steps, and with these data sets alone; None: as it is."""
    if data is not None:
        names = tuple(data)
        setting = replace(setting, layout_data=names, whole_data=names, bare_data=names)
    return setting if steps is None else replace(setting, steps=steps)


@cache
def world(device: str) -> World:
    """This process alone, once."""
    return init_distributed(device, timeout_s=600.0)


def options_of(setting: Setting, **engine: Any) -> ModelOptions:
    """Model options for keys of ``engine``; ValueError where this machine lacks one."""
    return resolve_engine(EngineConfig(device=setting.device, **engine)).options


def backends(setting: Setting) -> tuple[list[AttentionBackend], dict[str, str]]:
    """The attention backends of this machine, and the reasons why others are missing."""
    available: list[AttentionBackend] = []
    missing = {}
    for name in get_args(AttentionBackend):
        try:
            available.append(options_of(setting, attention=name).attention)
        except ValueError as error:
            missing[name] = str(error)
    return available, missing


def fast_backends(setting: Setting) -> list[AttentionBackend]:
    """Backends that may be the fastest: on CUDA, those of one kernel a row."""
    available, _ = backends(setting)
    slow = ("dense", "segments") if setting.device == "cuda" else ()
    return [name for name in available if name not in slow]


def open_bench(
    setting: Setting,
    spec: ModelSpec,
    *,
    engine: Mapping[str, Any] | None = None,
    recompute: str = "none",
    optimizer: OptimizerConfig | None = None,
) -> Bench:
    """Policy, reference and optimizer on this process's device."""
    free_device()
    options = replace(options_of(setting, **(engine or {})), recompute=recompute)
    return make_bench(spec, options, PLAN, world(setting.device), optimizer=optimizer)


def reason_of(error: Exception) -> str:
    """One line for a failure; raises if the device is unusable.

    Compilers, kernels and Transformer Engine raise any exception: AssertionError, TypeError.
    """
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return one_line(error)


def pairs_of_a_step(setting: Setting, name: str) -> int:
    """Pairs of a data set's lengths that fill the rows of a step when their prompts are shared."""
    tokens = named_lengths(4096, name, setting.tokens).sum(axis=1).mean()
    return max(1, int(setting.rows * setting.tokens / tokens))


def open_dataset(setting: Setting, name: str, num_steps: int, pairs: int) -> ExampleDataset:
    """Pairs for ``num_steps`` steps."""
    return named_pairs(num_steps * pairs, name, setting.tokens, setting.spec.vocab_size)


def rows_of(
    setting: Setting,
    dataset: ExampleDataset,
    layout: str,
    pairs: int,
    attention: AttentionBackend,
) -> DataBatches:
    """Steps of packed rows of a data set."""
    loader = make_loader(dataset, layout, True, setting.tokens, pairs, ALONE)
    return DataBatches(loader, attention, world(setting.device).device)


def first_microbatch(setting: Setting, name: str) -> tuple[Microbatch, int]:
    """The first row of a data set's lengths, prompts shared; and the pairs of its batch."""
    pairs = pairs_of_a_step(setting, name)
    dataset = open_dataset(setting, name, 1, pairs)
    loader = make_loader(dataset, "shared", True, setting.tokens, pairs, ALONE)
    return loader.batch(0).microbatches[0], pairs


def row_of(setting: Setting, name: str, attention: AttentionBackend) -> tuple[RowInput, int]:
    """The first row on the device, and the pairs of its batch."""
    microbatch, pairs = first_microbatch(setting, name)
    return to_device(microbatch, attention, world(setting.device).device), pairs


def timed(work: Callable[[], object], device: str, repeats: int) -> float:
    """Mean seconds of ``work``, until the device is done, after a warm-up."""
    here = torch.device(device)
    work()
    start = now(here)
    for _ in range(repeats):
        work()
    return (now(here) - start) / repeats
