"""``python -m tests.fuzz [KIND ...] [--cases N] [--seed N] [--only N]``."""

import argparse
import sys

from tqdm import tqdm

from tests.fuzz import harness


def main() -> int:
    """Run cases; exit code 1 if one did not end as it must."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("kinds", nargs="*", help="kinds (default: all)")
    parser.add_argument("--cases", type=int, default=10_000, help="cases of every kind")
    parser.add_argument("--seed", type=int, default=0, help="decides the cases")
    parser.add_argument("--only", type=int, help="run this one here, and print its traceback")
    parser.add_argument("--json", action="store_true", help="print JSON alone")
    args = parser.parse_args()
    names = args.kinds or harness.kind_names()
    if unknown := sorted({*names} - {*harness.kind_names()}):
        parser.error(f"no kind {', '.join(unknown)}; there are {', '.join(harness.kind_names())}")
    if args.only is not None:
        for name in names:
            harness.show(name, args.only, args.seed)
        return 0
    reports = []
    for name in names:
        with tqdm(desc=name, total=args.cases, disable=args.json or None, leave=False) as bar:
            reports.append(harness.run_kind(name, range(args.cases), args.seed, bar.update))
        if not args.json:
            _print(reports[-1])
    if args.json:
        print(harness.as_json(reports))
    return 0 if all(report.is_clean for report in reports) else 1


def _print(report: harness.Report) -> None:
    counts = ", ".join(f"{report.counts[name]} {name}" for name in harness.OUTCOMES)
    print(f"{report.kind}: {counts}; {report.seconds:.0f} s, slowest {report.slowest_s:.2f} s")
    for finding in report.findings[:20]:
        print(f"  {finding}")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
