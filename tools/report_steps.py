"""Parts of a GPU report that time DPO steps: layouts and backends, the whole model, switches."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

from dpo_steps import Bench, Step, run_step, summarize
from report_memory import layers_that_fit, open_and_weigh
from report_process import Found, Save, free_device
from report_setting import (
    Setting,
    backends,
    fast_backends,
    first_microbatch,
    open_bench,
    open_dataset,
    options_of,
    pairs_of_a_step,
    reason_of,
    rows_of,
    world,
)

from puzzle_align.config.sections.data import SYNTHETIC_LENGTHS
from puzzle_align.config.sections.engine import FUSIONS
from puzzle_align.config.sections.optimizer import OptimizerConfig
from puzzle_align.data.dataset import ExampleDataset
from puzzle_align.layout.model import AttentionBackend
from puzzle_align.runtime.profiler import AttentionCase, fastest_attention

LAYOUTS = ("shared", "paired")
_HH = "hh_rlhf"
# Of the data sets whose pairs a second were measured before, with a stack of bare PyTorch.
WHOLE_DATA = (_HH, "tldr", "ultrafeedback", "metamath_dpo")


@dataclass(frozen=True)
class Change:
    """Settings that differ from the defaults, measured alone."""

    engine: Mapping[str, Any] = field(default_factory=dict)
    recompute: str = "none"
    optimizer: OptimizerConfig | None = None


# What a 7B policy with its reference needs to fit one device.
SMALL = OptimizerConfig(use_distributed_optimizer=True, state_dtype="bf16")
SWITCHES = {
    "defaults": Change(),
    **{f"without {name}": Change({name: False}) for name in FUSIONS},
    "fp8": Change({"fp8": "hybrid"}),
    "Megatron's local layers": Change({"transformer_impl": "local"}),
    "recompute selective": Change(recompute="selective"),
    "recompute full": Change(recompute="full"),
    "logits of 4096 predictions at once": Change({"logprob_chunk_size": 4096}),
    "optimizer state in bf16": Change(optimizer=SMALL),
    "optimizer state on the host": Change(optimizer=replace(SMALL, cpu_offload=True)),
}


def layouts(setting: Setting, save: Save) -> None:
    """Every backend with every layout on the lengths of every data set, on a few layers."""
    _, missing = backends(setting)
    names = fast_backends(setting)
    save({"layers": setting.few_layers, "missing": missing})
    bench, found = open_bench(setting, setting.model(), optimizer=SMALL), {}
    for data in SYNTHETIC_LENGTHS:
        found[data] = _compare(setting, bench, data, names)
        save({"data": found})


def whole_model(setting: Setting, save: Save) -> None:
    """A step of the whole model, or of as many layers as the memory holds; its memory by part."""
    _whole(setting, save, {}, WHOLE_DATA)


def whole_model_fp8(setting: Setting, save: Save) -> None:
    """The same with the policy's layers in FP8; where there is no FP8, as it is."""
    engine = {"fp8": "hybrid"} if setting.device == "cuda" else {}
    _whole(setting, save, engine, WHOLE_DATA[:1])


def _whole(setting: Setting, save: Save, engine: Mapping[str, Any], data: Sequence[str]) -> None:
    options = options_of(setting, **engine)
    layers = layers_that_fit(setting, options, SMALL)
    save({"layers": layers, "of": setting.spec.num_hidden_layers})
    free_device()
    bench, memory = open_and_weigh(setting, setting.model(layers), options, SMALL)
    fastest = _fastest(setting, bench)
    save({"attention": fastest})
    found, peak = {}, 0
    for name in data:
        found[name] = _compare(setting, bench, name, [fastest])
        peaks = (variant["peak_memory"] for variant in found[name]["variants"].values())
        peak = max(peak, *peaks, 0)
        save({"data": found, "memory": memory.with_peak(peak)})


def _fastest(setting: Setting, bench: Bench) -> AttentionBackend:
    """The backend that ``engine.attention=auto`` takes for rows like these."""
    row, _ = first_microbatch(setting, _HH, bench.policy)
    spec = bench.policy.spec
    case = AttentionCase(
        layout=row.layout,
        num_heads=spec.num_attention_heads,
        num_groups=spec.num_key_value_heads,
        head_dim=spec.head_dim,
        dtype=bench.policy.dtype,
    )
    return fastest_attention(case, fast_backends(setting), world(setting.device))


def switches(setting: Setting, save: Save) -> None:
    """Each switch alone: what a step does, and the most memory that it takes."""
    found: Found = {}
    setting = replace(setting, rows=1)
    for name, change in SWITCHES.items():
        try:
            found[name] = _with(setting, change)
        except Exception as error:  # noqa: BLE001 - see reason_of
            found[name] = {"error": reason_of(error)}
        save({"layers": setting.few_layers, "data": _HH, "switches": found})


def _with(setting: Setting, change: Change) -> Found:
    bench = open_bench(
        setting,
        setting.model(),
        engine=change.engine,
        recompute=change.recompute,
        optimizer=change.optimizer,
    )
    return _compare(setting, bench, _HH, [bench.options.attention], LAYOUTS[:1])["variants"][
        f"shared+{bench.options.attention}"
    ]


def _compare(
    setting: Setting,
    bench: Bench,
    data: str,
    names: Sequence[AttentionBackend],
    layouts: Sequence[str] = LAYOUTS,
) -> Found:
    """Steps of a data set's lengths, layouts and backends in turns; what fails is left out."""
    pairs, num_steps = pairs_of_a_step(setting, data), setting.warmup + setting.steps
    dataset = open_dataset(setting, data, num_steps, pairs)
    rows = {
        f"{layout}+{name}": rows_of(setting, dataset, layout, pairs, bench.policy, name)
        for layout, name in product(layouts, names)
    }
    measured: dict[str, list[Step]] = {name: [] for name in rows}
    failed: dict[str, str] = {}
    for step in range(num_steps):
        for name in rows:
            if name in failed:
                continue
            try:
                done = run_step(bench, rows[name], step)
            except Exception as error:  # noqa: BLE001 - see reason_of
                failed[name] = reason_of(error)
                continue
            if step >= setting.warmup:
                measured[name].append(done)
    variants = {
        name: summarize(steps, bench.policy.spec, 1) for name, steps in measured.items() if steps
    }
    found: Found = {"pairs_per_step": pairs, "token_ratio": _token_ratio(dataset)}
    return found | {"variants": variants, "failed": failed}


def _token_ratio(dataset: ExampleDataset) -> float:
    """Tokens of pairs with two prompts over those with one."""
    prompts, responses = dataset.prompt_lengths.sum(), dataset.response_lengths.sum()
    return float((2 * prompts + responses) / (prompts + responses))
