"""How long packing takes, and how full the rows get: JSON on stdout.

python tools/bench_packing.py --pairs 1000000 --tokens 4096
"""

import argparse
import json
import time

import numpy as np

from puzzle_align.data.packing import first_fit_decreasing

DISTRIBUTIONS = ("lognormal", "uniform")


def draw_lengths(distribution: str, num_pairs: int, capacity: int, seed: int) -> np.ndarray:
    """Lengths of pairs, int64 [num_pairs], from 1 to ``capacity``."""
    rng = np.random.default_rng(seed)
    if distribution == "uniform":
        return rng.integers(1, capacity + 1, num_pairs)
    return np.clip(rng.lognormal(np.log(capacity / 8), 0.8, num_pairs), 1, capacity).astype(int)


def measure(distribution: str, num_pairs: int, capacity: int, seed: int) -> dict[str, object]:
    """Seconds and fill of one packing."""
    lengths = draw_lengths(distribution, num_pairs, capacity, seed)
    started = time.perf_counter()
    rows = first_fit_decreasing(lengths, capacity)
    seconds = time.perf_counter() - started
    return {
        "distribution": distribution,
        "num_pairs": num_pairs,
        "row_tokens": capacity,
        "num_rows": len(rows),
        "fill": float(lengths.sum() / (len(rows) * capacity)),
        "seconds": seconds,
    }


def main() -> None:
    """Measure every distribution."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=1_000_000, help="pairs to pack")
    parser.add_argument("--tokens", type=int, default=4096, help="tokens in a row")
    parser.add_argument("--seed", type=int, default=0, help="of the lengths")
    args = parser.parse_args()
    found = [measure(name, args.pairs, args.tokens, args.seed) for name in DISTRIBUTIONS]
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
