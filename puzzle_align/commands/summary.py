"""What commands show on the screen."""

import sys
from collections.abc import Sequence


def say(text: str) -> None:
    """Show a line, or several."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def ranks_text(ranks: Sequence[int]) -> str:
    """``rank 0``, ``ranks 0 to 3``, or where they are no neighbours, ``ranks 0, 2``."""
    if list(ranks) != list(range(ranks[0], ranks[0] + len(ranks))):
        return f"ranks {', '.join(map(str, ranks))}"
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]} to {ranks[-1]}"
