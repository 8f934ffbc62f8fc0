"""Format numbers and lines for people: step lines, the closing table."""

from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

PERCENTILES = (50, 90, 99, 100)
Formatted = tuple[str, str, str]  # metric, label, format

STEP_FIELDS: tuple[Formatted, ...] = (
    ("loss", "loss", ".4f"),
    ("rewards/accuracies", "rewards/accuracies", ".2f"),
    ("rewards/margins", "rewards/margins", ".4f"),
    ("accuracy", "accuracy", ".2f"),
    ("margin", "margin", ".4f"),
    ("objective/scores", "scores", ".4f"),
    ("kl", "kl", ".4f"),
    ("objective/kl", "kl", ".4f"),
    ("policy/approxkl_avg", "approxkl", ".2e"),
    ("policy/clipfrac_avg", "clipfrac", ".3f"),
    ("loss/policy_avg", "loss/policy", ".4f"),
    ("loss/value_avg", "loss/value", ".4f"),
    ("completions/mean_length", "length", ".1f"),
    ("grad_norm", "grad_norm", ".3g"),
    ("learning_rate", "lr", ".2e"),
)


# On a terminal: these fit a line of 80 columns.
SCREEN_FIELDS: tuple[Formatted, ...] = (
    ("loss", "loss", ".4f"),
    ("rewards/accuracies", "accuracy", ".2f"),
    ("accuracy", "accuracy", ".2f"),
    ("objective/scores", "score", ".4f"),
    ("loss/policy_avg", "loss", ".4f"),
    ("kl", "kl", ".4f"),
    ("objective/kl", "kl", ".4f"),
    ("grad_norm", "grad_norm", ".3g"),
    ("policy/grad_norm", "grad_norm", ".3g"),
    ("learning_rate", "lr", ".2e"),
    ("policy/learning_rate", "lr", ".2e"),
)


def duration(seconds: float) -> str:
    """``7s``, ``1m02s``, ``3h05m``, ``2d03h``."""
    total = max(0, round(seconds))
    if total < 60:
        return f"{total}s"
    if total < 3600:
        return f"{total // 60}m{total % 60:02d}s"
    if total < 86400:
        return f"{total // 3600}h{total % 3600 // 60:02d}m"
    return f"{total // 86400}d{total % 86400 // 3600:02d}h"


def quantity(value: float) -> str:
    """Three significant digits with k, M or G: ``35.1``, ``4.1k``, ``12M``."""
    value = float(f"{value:.3g}")  # first, so that 999.6 becomes 1k
    for scale, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= scale:
            return f"{value / scale:.3g}{suffix}"
    return f"{value:.3g}"


def num_bytes(value: float) -> str:
    """Bytes in binary units: ``512 B``, ``1.5 GiB``."""
    for scale, unit in ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if value >= scale:
            return f"{value / scale:.1f} {unit}"
    return f"{value:.0f} B"


def fields(
    metrics: Mapping[str, float], shown: Iterable[Formatted] = STEP_FIELDS, prefix: str = ""
) -> str:
    """The metrics of ``shown``, in order: ``loss 0.6931 rewards/accuracies 0.52``.

    Names in ``metrics`` begin with ``prefix``, which is not shown. Of one label the last counts.
    """
    found = {
        label: f"{metrics[prefix + name]:{form}}"
        for name, label, form in shown
        if prefix + name in metrics
    }
    return " ".join(f"{label} {value}" for label, value in found.items())


def cut(line: str, width: int) -> str:
    """The line, without the last words if it is longer than ``width``."""
    return line if len(line) <= width else line[: width + 1].rpartition(" ")[0] or line[:width]


def speed(metrics: Mapping[str, float]) -> str:
    """``35.1 pairs/s 4.1k tok/s`` (or responses/s); empty if no time was measured."""
    shown = (("pairs_per_second", "pairs/s"), ("responses_per_second", "responses/s"))
    parts = [f"{quantity(metrics[name])} {unit}" for name, unit in shown if name in metrics]
    if parts:
        parts.append(f"{quantity(metrics['tokens_per_second'])} tok/s")
    return " ".join(parts)


def table(lines: Iterable[tuple[str, str]], title: str) -> str:
    """``title`` and two aligned columns, without a closing newline."""
    lines = list(lines)
    width = max((len(name) for name, _ in lines), default=0)
    return "\n".join([title, *(f"  {name:<{width}}  {value}" for name, value in lines)])


def length_lines(lengths: Mapping[str, np.ndarray]) -> Iterator[str]:
    """A heading, and a line per name with percentiles of its lengths in tokens."""
    heads = [f"{rank}%" if rank < 100 else "longest" for rank in PERCENTILES]
    yield f"  {'tokens':<16}" + "".join(f"{head:>9}" for head in heads)
    for name, values in lengths.items():
        lengths_at = np.percentile(values, PERCENTILES, method="higher")
        yield f"  {name:<16}" + "".join(f"{int(value):>9}" for value in lengths_at)


def ranks_text(ranks: Sequence[int]) -> str:
    """Format ranks: ``rank 0``, ``ranks 0 to 3``, or if not contiguous, ``ranks 0, 2``."""
    if list(ranks) != list(range(ranks[0], ranks[0] + len(ranks))):
        return f"ranks {', '.join(map(str, ranks))}"
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]} to {ranks[-1]}"
