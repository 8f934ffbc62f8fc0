"""The command line called inside the test's process."""

import logging
from collections.abc import Sequence

from puzzle_align.cli import main as cli


def main(arguments: Sequence[str]) -> int:
    """Run a command as ``cli.main.process`` does, but for the process's end; its exit code."""
    cli.set_cuda_defaults()
    logger = logging.getLogger("puzzle_align")
    level = logger.level
    cli.show_log()
    try:
        cli.main(arguments)
    except ValueError as error:
        if not cli.is_mistake(error):
            raise
        cli.report_mistake(error)
        return cli.USER_ERROR
    finally:
        logger.setLevel(level)  # of other tests
    return 0
