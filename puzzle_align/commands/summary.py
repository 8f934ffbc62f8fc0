"""What is shown of a job on the screen: lines, and tables of lengths."""

import sys
from collections.abc import Iterator, Mapping

import numpy as np

PERCENTILES = (50, 90, 99, 100)


def say(text: str) -> None:
    """Show a line, or several."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def ranks_text(ranks: range) -> str:
    """``rank 0`` or ``ranks 0 to 3``."""
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]} to {ranks[-1]}"


def length_lines(lengths: Mapping[str, np.ndarray]) -> Iterator[str]:
    """A heading, and a line a name: percentiles of its lengths, in tokens."""
    heads = [f"{rank}%" if rank < 100 else "longest" for rank in PERCENTILES]
    yield f"  {'tokens':<16}" + "".join(f"{head:>9}" for head in heads)
    for name, values in lengths.items():
        found = np.percentile(values, PERCENTILES, method="higher")
        yield f"  {name:<16}" + "".join(f"{int(value):>9}" for value in found)
