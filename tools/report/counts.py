"""Figures of a report's parts in words: sizes, timed work, counted FLOPs or bytes."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from dpo_steps import PASSES, PHASES

from puzzle_align.config.sections.data import SYNTHETIC_LENGTHS
from puzzle_align.layout.flops import flops_per_token
from puzzle_align.layout.model import ModelSpec, num_parameters
from report import generation, machine
from report.bare import BARE_DATA
from report.setting import Setting
from report.steps import SWITCHES, WHOLE_DATA


class Counts(NamedTuple):
    """A part's row in the table of what parts count; pairs come from its results."""

    model: str
    data: str
    timed: str
    counted: str


def _model(spec: ModelSpec) -> str:
    return f"{spec.num_hidden_layers} layers, {num_parameters(spec) / 1e9:.2f}e9 parameters"


def _flops(spec: ModelSpec, work: str) -> str:
    passes, flops = PASSES[work], flops_per_token(spec)
    of = f"the layers' matrices ({flops / 1e9:.2f} GFLOP)"
    return f"FLOPs of used tokens: {passes} x forward of {of}; no attention, embedding, head"


def _steps(setting: Setting, spec: ModelSpec, data: Sequence[str]) -> Counts:
    """Steps of ``dpo_steps``."""
    return Counts(
        f"policy and reference, each {_model(spec)}",
        f"{', '.join(data)}: {setting.steps} steps, and {setting.warmup} before the first, of "
        f"about {setting.rows} rows of {setting.tokens} tokens at most",
        f"whole steps: {', '.join(PHASES)}; not building and compiling",
        _flops(spec, "step"),
    )


def _whole(setting: Setting, data: Sequence[str], beside: str = "") -> Counts:
    counts = _steps(setting, setting.spec, data)
    return counts._replace(data=counts.data + beside)


def _ceilings(setting: Setting) -> Counts:
    size = setting.matrix
    return Counts(
        f"none; packing: {_model(setting.model())}",
        f"products of {size} x {size} in bf16; copies of {16 * size**2 / 1e9:.2f} GB",
        "work alone, between two waits for the device",
        f"{2 * size**3 / 1e9:.0f} GFLOP a product; copies within the device: bytes read and "
        "written; to the host and back, packing, unpacking: bytes once",
    )


def _layers(setting: Setting) -> Counts:
    return Counts(
        f"{_model(setting.model())}, of which the layers run",
        f"one row of {setting.tokens} tokens, {machine.REPEATS} times",
        "forward and backward of the layers; not embedding, head, loss, optimizer",
        _flops(setting.model(), "policy"),
    )


def _generation(setting: Setting) -> Counts:
    ways = [f"{generation.OURS}, {way}" for way in setting.eager] + [*generation.THEIR_WAYS]
    return Counts(
        _model(setting.spec),
        f"{', '.join(map(str, setting.sequences))} prompts of {generation.prompt_tokens(setting)} "
        f"tokens, each {setting.new_tokens} new tokens: {'; '.join(ways)}",
        "decode: calls for all new tokens less calls for one, once after a warm-up; prefill: "
        "calls for one token",
        f"{setting.new_tokens - 1} steps",
    )


def _kernels(setting: Setting) -> Counts:
    return Counts(
        _model(setting.model()),
        f"one row of {setting.tokens} tokens, once, after a warm-up",
        "kernels of the policy's forward and backward, by torch's profiler",
        "seconds; no FLOPs",
    )


def _host(setting: Setting) -> Counts:
    setting = replace(setting, steps=setting.varied_batches, rows=1)
    counts = _steps(setting, setting.model(), WHOLE_DATA[:1])
    return counts._replace(counted="waits and compilations; seconds of the phase data over all")


def _switches(setting: Setting) -> Counts:
    counts = _steps(replace(setting, rows=1), setting.model(), WHOLE_DATA[:1])
    return counts._replace(model=f"{counts.model}, anew for each of {len(SWITCHES)} switches")


def _losses(setting: Setting) -> Counts:
    return Counts(
        "dpo_tiny with " + " ".join(setting.loss_job),
        f"{setting.loss_steps} steps, each of {', '.join(setting.tried)}",
        "nothing",
        "mean losses",
    )


def _nothing_timed(model: str, data: Callable[[Setting], str]) -> Callable[[Setting], Counts]:
    return lambda setting: Counts(model, data(setting), "nothing", "")


COUNTS: dict[str, Callable[[Setting], Counts]] = {
    "environment": _nothing_timed("none", lambda _: "none"),
    "tests": _nothing_timed("the tests' own", lambda s: f"{s.test_files} marked gpu"),
    "whole_model": lambda s: _whole(s, WHOLE_DATA, f"; bare PyTorch: {', '.join(BARE_DATA)}"),
    "whole_model_fp8": lambda s: _whole(s, WHOLE_DATA[:1]),
    "ceilings": _ceilings,
    "layers": _layers,
    "layouts": lambda s: _steps(s, s.model(), tuple(SYNTHETIC_LENGTHS)),
    "kernels": _kernels,
    "generation": _generation,
    "losses": _losses,
    "host": _host,
    "switches": _switches,
}
