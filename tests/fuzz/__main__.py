"""``python -m tests.fuzz [KIND ...] [--cases N] [--seed N] [--only N]``."""

import argparse
import json
import sys

from tqdm import tqdm

from tests.fuzz import harness


def main() -> int:
    """Run cases, and print what became of them as JSON; exit code 1 if one did not end as it must.

    A finding begins with the arguments that show its case again.
    """
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    known = harness.kind_names()
    parser.add_argument("kinds", nargs="*", metavar="KIND", help=f"of {', '.join(known)} (all)")
    parser.add_argument("--cases", type=int, default=10_000, help="cases of every kind")
    parser.add_argument("--seed", type=int, default=0, help="decides the cases")
    parser.add_argument("--only", type=int, help="run this one here, and print its traceback")
    args = parser.parse_args()
    if unknown := sorted({*args.kinds} - {*known}):
        parser.error(f"no kind {', '.join(unknown)}; there are {', '.join(known)}")
    reports = []
    for name in args.kinds or known:
        if args.only is not None:
            harness.show(name, args.only, args.seed)
            continue
        with tqdm(desc=name, total=args.cases, disable=None, leave=False) as bar:
            reports.append(harness.run_kind(name, range(args.cases), args.seed, bar.update))
    if args.only is None:
        print(json.dumps({report.kind: vars(report) for report in reports}, indent=1))
    return 1 if any(report.findings for report in reports) else 0


if __name__ == "__main__":
    sys.exit(main())
