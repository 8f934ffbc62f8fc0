"""``puzzle-align train``: a config, overrides, and what to do with them."""

import argparse
import os
import sys
from collections.abc import Sequence

from puzzle_align.cli.arguments import add_job, positive
from puzzle_align.cli.keys import describe_keys
from puzzle_align.cli.log import quiet_libraries, show_log
from puzzle_align.config.check import check_before_start
from puzzle_align.config.load import dump_job, find_config, load_file
from puzzle_align.config.placement import smallest_world_size
from puzzle_align.runtime.failure import rank


def main(arguments: Sequence[str]) -> None:
    """Print the config, validate the job, or run it.

    Raises:
        ValueError: the config, or what it refers to, is wrong.
    """
    args = _parser().parse_intermixed_args(arguments)
    job = load_file(find_config(args.config), args.overrides)
    if args.print_config:
        sys.stdout.write(dump_job(job))
        return
    quiet_libraries()
    show_log()
    world_size = args.world_size or int(os.environ.get("WORLD_SIZE", "0"))
    if args.validate:
        if rank() > 0:
            return  # one process sees all that there is to see
        from puzzle_align.commands import validate

        validate.validate_job(job, world_size or smallest_world_size(job))
        return
    check_before_start(job, world_size or 1)
    from puzzle_align.stages.run import run

    run(job)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="puzzle-align train",
        description="Train as a config says, on the ranks that torchrun started (alone: on one).",
        epilog=describe_keys(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_job(parser)
    parser.add_argument(
        "--print-config", action="store_true", help="print the config with every key, and stop"
    )
    parser.add_argument(
        "--validate",
        action="store_true",
        help="check config, data, tokenizer, plan, model and memory, and train nothing",
    )
    parser.add_argument(
        "--world-size",
        type=positive,
        metavar="N",
        help="ranks to validate for; default: those started, else the fewest the plan needs",
    )
    return parser
