"""Figures of a report's parts in words: models, data, timed work, counted FLOPs or bytes."""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from dpo_steps import PASSES, PHASES

from puzzle_align.layout.flops import flops_per_token
from puzzle_align.layout.model import ModelSpec
from puzzle_align.layout.weights import num_parameters
from report.generation import OURS, THEIR_WAYS, prompt_tokens
from report.machine import REPEATS
from report.setting import Setting
from report.steps import SWITCHES


class Counts(NamedTuple):
    """A part's row in the table of what parts count; pairs of a step come from its results."""

    model: str
    data: str
    timed: str = "nothing"
    counted: str = ""


def counts_of(setting: Setting) -> dict[str, Counts]:
    """Every part's row."""
    few, hh, size = setting.model(), setting.whole_data[:1], setting.matrix
    row, new = f"one row of {setting.tokens} tokens", setting.new_tokens
    whole, short = _steps(setting, setting.spec, setting.whole_data), replace(setting, rows=1)
    switches = _steps(short, few, hh)
    ways = "; ".join([f"{OURS}, {way}" for way in setting.eager] + [*THEIR_WAYS])
    return {
        "environment": Counts("none", "none"),
        "tests": Counts("the tests' own", f"{setting.test_files} marked gpu"),
        "whole_model": whole._replace(
            data=f"{whole.data}; bare PyTorch: {', '.join(setting.bare_data)}; TRL: {hh[0]}"
        ),
        "whole_model_fp8": _steps(setting, setting.spec, hh),
        "ceilings": Counts(
            f"none; packing: {_model(few)}",
            f"products of {size} x {size} in bf16; copies of {16 * size**2 / 1e9:.2f} GB",
            "work alone, between two waits for the device",
            f"{2 * size**3 / 1e9:.0f} GFLOP a product; a copy within the device: bytes read and "
            "written; to the host and back, packing, unpacking: bytes once",
        ),
        "layers": Counts(
            f"{_model(few)}, of which the layers run",
            f"{row}, {REPEATS} times",
            "forward and backward of the layers; not embedding, head, loss, optimizer",
            _flops(few, "policy"),
        ),
        "layouts": _steps(setting, few, setting.layout_data),
        "kernels": Counts(
            _model(few), f"{row}, once", "the policy's kernels, by torch's profiler", "seconds"
        ),
        "generation": Counts(
            _model(setting.spec),
            f"{', '.join(map(str, setting.sequences))} prompts of {prompt_tokens(setting)} tokens, "
            f"each {new} new tokens: {ways}",
            f"decode: calls for {new} tokens less calls for one, after a warm-up; prefill: the "
            "latter",
            f"{new - 1} steps",
        ),
        "losses": Counts(
            "dpo_tiny with " + " ".join(setting.loss_job),
            f"{setting.loss_steps} steps, each of {', '.join(setting.tried)}",
            counted="mean losses",
        ),
        "host": _steps(replace(short, steps=setting.varied_batches), few, hh)._replace(
            counted="waits and compilations; seconds of phase data over all"
        ),
        "switches": switches._replace(model=f"{switches.model}, anew for {len(SWITCHES)} switches"),
    }


def _steps(setting: Setting, spec: ModelSpec, data: Sequence[str]) -> Counts:
    """Steps of ``dpo_steps``."""
    return Counts(
        f"policy and reference, each {_model(spec)}",
        f"{', '.join(data)}: {setting.steps} steps, and {setting.warmup} before the first, of "
        f"about {setting.rows} rows of {setting.tokens} tokens at most",
        f"whole steps: {', '.join(PHASES)}; not building and compiling",
        _flops(spec, "step"),
    )


def _model(spec: ModelSpec) -> str:
    return f"{spec.num_hidden_layers} layers, {num_parameters(spec) / 1e9:.2f}e9 parameters"


def _flops(spec: ModelSpec, work: str) -> str:
    of = f"the layers' matrices ({flops_per_token(spec) / 1e9:.2f} GFLOP)"
    return f"FLOPs of used tokens: {PASSES[work]} x forward of {of}; no attention, embedding, head"
