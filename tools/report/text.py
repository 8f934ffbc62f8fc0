"""A GPU report as Markdown: its figures beside those measured before, then part by part."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

from report.process import Results

Parts = Mapping[str, Results]

# Pairs a second of a stack of bare PyTorch, paired and shared, both packed, on an H200.
_BARE = {
    "hh_rlhf": (29.9, 41.7),
    "tldr": (11.5, 20.8),
    "ultrafeedback": (17.3, 21.6),
    "metamath_dpo": (5.7, 8.6),
}
_GOAL_SEQUENCES = "32"  # whose decode step has a goal
_TRL = {"hh_rlhf": 10.8, "metamath_dpo": 2.0}  # TRL 1.16's DPOTrainer, sdpa, pairs a second
# The prefix-sharing paper's figures: shared over paired, both packed.
_PAPER = {
    "capybara": 1.34,
    "hh_rlhf": 1.41,
    "metamath_dpo": 1.57,
    "tldr": 1.35,
    "helpsteer": 1.48,
    "ultrafeedback": 1.17,
}


@dataclass(frozen=True)
class Line:
    """A figure beside an earlier one and its goal."""

    what: str
    before: str
    asked: str
    here: float | None  # None: not found
    is_met: Callable[[float], bool] | None = None
    form: str = "{:.0f}"
    extremes: Sequence[float] | None = None  # minimum and maximum; here is the median

    def text(self) -> str:
        """Its row of the table."""
        if self.here is None:
            return f"| {self.what} | {self.before} | {self.asked} | not found | |"
        verdict = "" if self.is_met is None else "yes" if self.is_met(self.here) else "**no**"
        here = self.form.format(self.here)
        if self.extremes is not None:
            here += f" ({' to '.join(map(self.form.format, self.extremes))})"
        return f"| {self.what} | {self.before} | {self.asked} | {here} | {verdict} |"


def markdown(parts: Parts, titles: Mapping[str, str], *, dry_run: bool) -> str:
    """The whole report."""
    lines = ["# GPU report", ""]
    if dry_run:
        lines += ["A dry run on a CPU, with a tiny model: no figure of it means anything.", ""]
    lines += _machine(parts.get("environment", {}))
    lines += ["## Against what was measured before", ""]
    lines += ["| what | before (H200) | asked | here | met |", "|---|---|---|---|---|"]
    lines += [line.text() for name in parts if name in _LINES for line in _LINES[name](parts[name])]
    lines += ["", "Medians (minimum to maximum). Rates count used tokens, not padding."]
    lines += ["", "## Parts", "", "| part | end | seconds |", "|---|---|---|"]
    for name, results in parts.items():
        reason = f": {results['error']}" if "error" in results else ""
        seconds = f"{results.get('seconds', 0):.0f}"
        lines.append(f"| {titles[name]} | {results['status']}{reason} | {seconds} |")
    for name, results in parts.items():
        if "last_output" in results:
            lines += ["", f"Last output of part {name}, which failed:", ""]
            lines += [f"    {line}" for line in results["last_output"]]
    lines += ["", "## What each part counts", "", *_counts(parts, titles)]
    for name, results in parts.items():
        if name in _SECTIONS:
            text = list(_SECTIONS[name](results))
            lines += ["", f"## {titles[name]}", "", *text] if text else []
    return "\n".join(lines) + "\n"


def _counts(parts: Parts, titles: Mapping[str, str]) -> Iterator[str]:
    """The table of sizes, timed work and counted FLOPs or bytes, from the parts' settings."""
    yield from _table("part", "model", "data", "pairs of a step", "timed", "counted")
    for name, results in parts.items():
        row = results.get("counts", {})
        pairs = (
            f"{data} {compared['pairs_per_step']}"
            for data, compared in (_at(results, "data") or {}).items()
        )
        cells = (titles[name], row.get("model"), row.get("data"), ", ".join(pairs))
        cells += (row.get("timed"), row.get("counted"))
        yield "| " + " | ".join(cell or "" for cell in cells) + " |"


def _machine(results: Results) -> list[str]:
    device = results.get("device", {})
    packages = results.get("packages", {})
    named = ", ".join(f"{name} {version}" for name, version in packages.items() if version)
    where = f"{device['name']}, {device['memory'] / 2**30:.0f} GiB, " if device else ""
    return [f"{where}{named}; {results.get('nvidia_smi', 'no nvidia-smi')}", ""]


def _at(value: Any, *keys: str) -> Any:
    """Value at nested ``keys``, or None."""
    for key in keys:
        if not isinstance(value, Mapping) or key not in value:
            return None
        value = value[key]
    return value


def _ceiling_lines(results: Results) -> Iterator[Line]:
    yield Line("bf16 product, TFLOP/s", "790", "", _at(results, "bf16_tflops"))


def _layer_lines(results: Results) -> Iterator[Line]:
    layers = _at(results, "layers") or 8
    for name, before in (("te", "572"), ("te fp8", "830"), ("local", "543")):
        here = _at(results, "variants", name, "linear_tflops")
        yield Line(f"{layers} layers alone, {name}, linear TFLOP/s", before, "", here)


def _loss_lines(results: Results) -> Iterator[Line]:
    against = _at(results, "against") or "bf16"
    differences = _at(results, "differences") or {"fp8": {}}
    for name, steps in product(differences, ("all", "last")):
        title = f"mean loss of {name} less {against}'s, {steps} steps"
        compared = _at(differences, name, steps)
        if not compared:
            yield Line(title, "", "within 1%", None)
            continue
        most = compared["tolerance"]
        asked = f"within {most:.4f}, of {compared['mean']:.4f}"
        here = compared["difference"]
        yield Line(title, "", asked, here, lambda x, most=most: abs(x) <= most, "{:+.4f}")


def _memory_lines(results: Results) -> Iterator[Line]:
    for name, here in (_at(results, "memory", "held/estimated") or {}).items():
        name = f"memory, held/estimated: {name}"
        yield Line(name, "", "0.9 to 1.1", here, lambda x: abs(x - 1) <= 0.1, "{:.3f}")


def _test_lines(results: Results) -> Iterator[Line]:
    failing = _at(results, "failed")
    yield Line("tests of the GPU that fail", "", "0", failing, lambda n: n == 0)


def _host_lines(results: Results) -> Iterator[Line]:
    share = _at(results, "share_of_data")
    yield Line("host work before a step", "", "<= 1%", share, lambda s: s <= 0.01, "{:.2%}")


def _bf16_lines(results: Results) -> Iterator[Line]:
    yield from _whole_lines(results, "bf16", "520 to 545", 545)
    yield from _rate_lines(results)
    yield from _bare_lines(results)
    if "pairs_per_second" in results.get("trl", {}):
        yield from _trl_lines(results, results["trl"])
    yield from _memory_lines(results)


def _whole_lines(results: Results, name: str, before: str, asked: int) -> Iterator[Line]:
    """Lines on the whole model, for HH's lengths."""
    variant = _best(_at(results, "data", "hh_rlhf"), "shared")
    title = f"whole step, {name}, {_way_text(results)}"
    yield Line(
        f"{title}, linear TFLOP/s",
        before,
        f"> {asked}",
        _at(variant, "linear_tflops", "step"),
        lambda t: t > asked,
        extremes=_at(variant, "extremes", "linear_tflops"),
    )
    if name == "bf16":
        seconds = variant and variant["step_seconds"] / variant["mean_microbatches_per_step"]
        yield Line(f"{title}, s a row", "0.84", "", seconds, form="{:.2f}")
        peak = variant and variant["peak_memory"] / 2**30
        yield Line(f"{title}, most memory, GiB", "92 to 95", "", peak)


def _way_text(results: Results) -> str:
    """How the whole model fits: its layers, tokens of a row, recompute, where its state is."""
    text = f"{results.get('layers', '?')} layers, rows of {results.get('tokens', '?')}"
    if results.get("recompute", "none") != "none":
        text += f", recompute {results['recompute']}"
    return text + ", optimizer state on the host" * results.get("optimizer_on_host", False)


def _rate_lines(results: Results) -> Iterator[Line]:
    """Pairs a second of the whole model."""
    for data in results.get("data", _BARE):
        rates = {}
        for layout, rate_before in zip(
            ("paired", "shared"), _BARE.get(data, ("", "")), strict=True
        ):
            variant = _best(_at(results, "data", data), layout)
            here = rates[layout] = _at(variant, "pairs_per_second")
            extremes = _at(variant, "extremes", "pairs_per_second")
            asked, met = ("", None)
            if (data, layout) == ("hh_rlhf", "shared"):
                asked, met = ">= 43", lambda r: r >= 43
            name = f"pairs/s, {data}, {layout} packed"
            yield Line(name, f"{rate_before}", asked, here, met, "{:.1f}", extremes)
        if data in _TRL:
            times = rates["shared"] and rates["shared"] / _TRL[data]
            name = f"{data} over TRL's {_TRL[data]} pairs/s"
            yield Line(name, "", ">= 4", times, lambda t: t >= 4, "{:.1f}")


def _bare_lines(results: Results) -> Iterator[Line]:
    """Pairs a second of bare PyTorch, in the same process on the same pairs, and ours over them."""
    for data, layout in product(_at(results, "bare", "data") or {}, ("paired", "shared")):
        bare = _best(_at(results, "bare", "data", data), layout)
        ours = _at(_best(_at(results, "data", data), layout), "pairs_per_second")
        rate, extremes = _at(bare, "pairs_per_second"), _at(bare, "extremes", "pairs_per_second")
        name = f"{data}, {layout} packed"
        yield Line(f"pairs/s of bare PyTorch, {name}", "", "", rate, None, "{:.1f}", extremes)
        times = ours and rate and ours / rate
        yield Line(f"ours over bare PyTorch, {name}", "", "", times, form="{:.2f}")


def _trl_lines(results: Results, trl: Results) -> Iterator[Line]:
    """Pairs a second of TRL, in the same process on the same pairs, and ours over them."""
    name, rate = f"TRL {trl['version']}, hh_rlhf", trl["pairs_per_second"]
    yield Line(f"pairs/s of {name}", "10.8", "", rate, None, "{:.1f}", trl["extremes"])
    ours = _at(_best(_at(results, "data", "hh_rlhf"), "shared"), "pairs_per_second")
    times = ours and ours / rate
    yield Line(f"shared over {name}", "", ">= 4", times, lambda t: t >= 4, "{:.1f}")


def _generation_lines(results: Results) -> Iterator[Line]:
    """Times of decode steps, each stack's fastest way."""
    for number, ways in (_at(results, "sequences") or {}).items():
        found = {way: v["ms_per_step"] for way, v in ways.items() if "error" not in v}
        ours, theirs = (
            min((ms for way, ms in found.items() if way.startswith(name)), default=None)
            for name in ("ours", "transformers")
        )
        name = f"decode step, {results['layers']} layers, {number} sequences"
        asked, met = ("", None)
        if number == _GOAL_SEQUENCES:
            asked, met = "<= 11", lambda ms: ms <= 11
        yield Line(f"{name}, ms", "", asked, ours, met, "{:.2f}")
        times = ours and theirs and theirs / ours
        yield Line(f"{name}, transformers over ours", "", "", times, form="{:.2f}")


def _sharing_lines(results: Results) -> Iterator[Line]:
    """Shared over paired, each with its best backend, against tokens and the paper."""
    for data, paper in _PAPER.items():
        compared = _at(results, "data", data)
        times = _at(compared, "shared_over_paired")
        tokens = _at(compared, "token_ratio")
        name = f"shared over paired, {data}"
        ratio = _at(times, "median")
        extremes = times and [times["minimum"], times["maximum"]]
        yield Line(
            name, "", f"> {paper}", ratio, lambda r, p=paper: r > p, "{:.2f}", extremes=extremes
        )
        over = times and times["median"] / tokens
        extremes = extremes and [each / tokens for each in extremes]
        yield Line(
            f"{name}, over tokens'", "", ">= 0.97", over, lambda r: r >= 0.97, "{:.3f}", extremes
        )
        rows = tokens and _at(compared, "row_ratio") / tokens
        name = f"rows of paired over shared, {data}, over tokens'"
        yield Line(name, "", "0.98 to 1.02", rows, lambda r: abs(r - 1) <= 0.02, "{:.3f}")


def _best(results: Any, layout: str) -> Any:
    """The variant of a layout with the most pairs a second, of those that ran all steps.

    None where there is none.
    """
    variants = _at(results, "variants") or {}
    of_layout = [v for name, v in variants.items() if name.startswith(f"{layout}+")]
    return max(of_layout, key=lambda v: (v["steps"], v["pairs_per_second"]), default=None)


def _layouts(results: Results) -> Iterator[str]:
    yield "Each backend runs one step; the fastest of each layout runs the others."
    yield ""
    yield from _variants(results)
    for name, reason in (_at(results, "missing") or {}).items():
        yield f"\n{name}: {reason}"


def _variants(results: Results) -> Iterator[str]:
    """Table of the variants of each data set; clock and power of the GPU during their steps."""
    yield from _table("data", "variant", "steps", "pairs/s", "linear TFLOP/s", "fill", "GiB")
    for data, compared in (_at(results, "data") or {}).items():
        for name, v in compared["variants"].items():
            pairs = _with_extremes(v["pairs_per_second"], v["extremes"]["pairs_per_second"], 1)
            tflops = _with_extremes(v["linear_tflops"]["step"], v["extremes"]["linear_tflops"], 0)
            figures = f"{v['steps']} | {pairs} | {tflops}"
            memory = f"{v['fill']:.3f} | {v['peak_memory'] / 2**30:.1f}"
            yield f"| {data} | {name} | {figures} | {memory} |"
        for name, reason in compared["failed"].items():
            yield f"| {data} | {name} | {reason} | | | | |"
    for data, compared in (_at(results, "data") or {}).items():
        if compared.get("gpu"):
            yield f"\n{data}: {_gpu_text(compared['gpu'])}"


def _sdpa(results: Results, name: str = "sdpa") -> str:
    """Names of the SDPA kernels that a profile showed."""
    return f"SDPA kernels in a profile: {', '.join(results.get(name, ())) or 'none'}"


def _gpu_text(gpu: Results) -> str:
    """Clock and power of the GPU during a measurement."""
    return ", ".join(
        f"{name} {_with_extremes(v['median'], (v['minimum'], v['maximum']), 0)}"
        for name, v in gpu.items()
    )


def _with_extremes(median: float, extremes: Sequence[float], digits: int) -> str:
    lowest, highest = (f"{each:.{digits}f}" for each in extremes)
    return f"{median:.{digits}f} ({lowest} to {highest})"


def _switches(results: Results) -> Iterator[str]:
    yield from _table("switch", "attention", "step TFLOP/s", "policy TFLOP/s", "optimizer s", "GiB")
    for name, v in (_at(results, "switches") or {}).items():
        if "error" in v:
            yield f"| {name} | {v['error']} | | | | |"
            continue
        rates = f"{v['linear_tflops']['step']:.0f} | {v['linear_tflops']['policy']:.0f}"
        rest = f"{v['phase_seconds']['optimizer']:.3f} | {v['peak_memory'] / 2**30:.1f}"
        yield f"| {name} | {v['attention']} | {rates} | {rest} |"


def _attention(results: Results) -> Iterator[str]:
    """A line that names the attention backend that ran, and an empty one."""
    yield f"Attention: {results.get('attention', '?')}."
    yield ""


def _losses(results: Results) -> Iterator[str]:
    yield from _attention(results)
    yield from _table("precision", "mean loss", "last loss")
    for name, losses in (_at(results, "losses") or {}).items():
        yield f"| {name} | {sum(losses) / len(losses):.4f} | {losses[-1]:.4f} |"


def _layers(results: Results) -> Iterator[str]:
    yield from _table("layers", "attention", "linear TFLOP/s", "fill")
    for name, v in (_at(results, "variants") or {}).items():
        if "error" in v:
            yield f"| {name} | {v['error']} | | |"
            continue
        yield f"| {name} | {v['attention']} | {v['linear_tflops']:.0f} | {v['fill']:.3f} |"


def _whole(results: Results) -> Iterator[str]:
    yield from _attention(results)
    yield from _layouts(results)
    yield ""
    if "bare" in results:
        bare = results["bare"]
        yield f"Bare PyTorch, recompute {bare['recompute']}: {bare.get('error', 'the same pairs')}."
        yield "Its gradients are as precise as its weights, without float32 ones: ours does more."
        yield f"Attention: {bare.get('attention', '?')}; {_sdpa(bare)}."
        yield ""
        yield from _variants(bare)
        yield ""
    if "error" in results.get("trl", {}):
        yield f"{results['trl']['error']}."
        yield ""
    yield from _table("part", "estimated GiB", "held GiB")
    for name, size in (_at(results, "memory", "estimated") or {}).items():
        held = _at(results, "memory", "held", name)
        yield f"| {name} | {size / 2**30:.2f} | {'' if held is None else f'{held / 2**30:.2f}'} |"


def _generation(results: Results) -> Iterator[str]:
    yield from _attention(results)
    yield "Decode steps. Every run captures its graphs anew; this time is included."
    yield ""
    yield from _table("sequences", "by", "tokens/s", "ms a step", "prefill s")
    for number, ways in (_at(results, "sequences") or {}).items():
        for way, v in ways.items():
            if "error" in v:
                yield f"| {number} | {way} | {v['error']} | | |"
                continue
            rates = f"{v['tokens_per_second']:.0f} | {v['ms_per_step']:.2f}"
            yield f"| {number} | {way} | {rates} | {v['prefill_seconds']:.3f} |"
    yield ""
    yield f"By ours, {_sdpa(results, 'sdpa_ours')}."
    yield f"By transformers, {_sdpa(results)}."
    if results.get("gpu"):
        yield f"\n{_gpu_text(results['gpu'])}"


def _ceilings(results: Results) -> Iterator[str]:
    yield from _table("work", "GB/s")
    yield f"| copy within the device | {results.get('copy_gb_per_second', 0):.1f} |"
    titles = {"offload": "pinned copy", "reshard": "weights, nothing sent"}
    for name, title in titles.items():
        for way, rate in results.get(f"{name}_gb_per_second", {}).items():
            yield f"| {title}: {way} | {rate:.1f} |"


def _tests(results: Results) -> Iterator[str]:
    yield ", ".join(f"{results.get(name, '?')} {name}" for name in ("passed", "failed", "skipped"))
    yield from (f"- {name}" for name in results.get("failures", ()))


def _host(results: Results) -> Iterator[str]:
    batches, waits, compilations = (
        results.get(name, "?") for name in ("batches", "host_waits", "compilations")
    )
    yield from _attention(results)
    yield f"{batches} batches after the first: {waits} waits, {compilations} compilations."
    yield ""
    yield "Lines that wait:"
    yield ""
    yield from (f"- {place}" for place in results.get("places", ()))


def _kernels(results: Results) -> Iterator[str]:
    yield from _attention(results)
    whole = results.get("seconds_in_kernels") or 1.0
    yield from _table("kernel", "calls", "ms", "share")
    for kernel in results.get("kernels", ()):
        figures = f"{kernel['seconds'] * 1e3:.2f} | {kernel['seconds'] / whole:.1%}"
        yield f"| `{kernel['name'].replace('|', '/')}` | {kernel['calls']} | {figures} |"


def _table(*columns: str) -> Iterator[str]:
    yield "| " + " | ".join(columns) + " |"
    yield "|" + "---|" * len(columns)


_LINES: dict[str, Callable[[Results], Iterator[Line]]] = {
    "tests": _test_lines,
    "whole_model": _bf16_lines,
    "ceilings": _ceiling_lines,
    "generation": _generation_lines,
    "layers": _layer_lines,
    "layouts": _sharing_lines,
    "whole_model_fp8": partial(_whole_lines, name="fp8", before="", asked=700),
    "losses": _loss_lines,
    "host": _host_lines,
}
_SECTIONS: dict[str, Callable[[Results], Iterator[str]]] = {
    "ceilings": _ceilings,
    "layers": _layers,
    "losses": _losses,
    "layouts": _layouts,
    "switches": _switches,
    "whole_model": _whole,
    "whole_model_fp8": _whole,
    "generation": _generation,
    "host": _host,
    "kernels": _kernels,
    "tests": _tests,
}
