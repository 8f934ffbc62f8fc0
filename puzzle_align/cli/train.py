"""``puzzle-align train``: print, validate or run the job of a config with overrides."""

import argparse
import logging
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from puzzle_align import __version__
from puzzle_align.cli.arguments import add_job, describe_keys, positive, ranks_to_show, read_job
from puzzle_align.commands.summary import say
from puzzle_align.config.check import check_keys
from puzzle_align.config.load import dump_job
from puzzle_align.runtime.liveness.failure import rank

_logger = logging.getLogger(__name__)


def main(arguments: Sequence[str]) -> None:
    """Print the config, validate the job, or run it; ValueError for a wrong config or file."""
    args = _parser().parse_intermixed_args(arguments)
    if args.world_size is not None and not args.validate:
        raise ValueError(
            "--world-size: only --validate reads it; a run is on the ranks that torchrun starts "
            f"(torchrun --nproc-per-node {args.world_size} launch/train.py ...)"
        )
    job, plan = read_job(args)
    if rank() > 0 and (args.print_config or args.validate):
        return  # one process is enough
    if args.print_config:
        say(dump_job(job).removesuffix("\n"))
        return
    started = int(os.environ.get("WORLD_SIZE", "0"))
    if args.validate:
        from puzzle_align.commands import validate

        asked = args.world_size or started
        world_size = ranks_to_show(asked, job, plan)
        if not asked and plan is None:
            written = world_size == job.engine.world_size
            why = "engine.world_size" if written else "the fewest that the job needs"
            say(f"ranks: {world_size}, {why}; give another number as --world-size N")
        validate.validate_job(job, world_size, plan)
        return
    if plan is None:
        check_keys(job)
    else:
        plan.check_world_size(started or 1)
    ranks = f"{started or 1} rank{'s' * (started > 1)}"
    _logger.info("puzzle-align %s: %s on %s: starting", __version__, job.stage, ranks)
    from puzzle_align.runtime.groups.world import shutdown_distributed
    from puzzle_align.stages.run import opened_run, train

    with opened_run(job, plan) as opened:
        ended_by = train(*opened)
    shutdown_distributed()
    if ended_by is not None:  # with 0, launchers on other nodes would take the job for finished
        sys.exit(128 + ended_by)


class _Parser(argparse.ArgumentParser):
    """A parser whose error says how keys are written: in other libraries they are options."""

    def error(self, message: str) -> NoReturn:
        """Exit with the message."""
        if message.startswith("unrecognized arguments: --"):
            message += "; keys are written key=value, such as optimizer.lr=1e-6"
        super().error(message)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="puzzle-align train",
        description="Train a config's job on the ranks that torchrun started, else on one.",
        epilog=describe_keys(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_job(parser)
    parser.add_argument(
        "--print-config",
        action="store_true",
        help="print the config with every key that the stage reads, and stop",
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
        help="ranks to --validate for; default: those that torchrun started, else the plan's or "
        "config's, else the fewest that the job needs",
    )
    return parser
