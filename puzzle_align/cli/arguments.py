"""Arguments that several commands take."""

import argparse


def add_job(parser: argparse.ArgumentParser) -> None:
    """``--config NAME [key=value ...]``: read them with ``parse_intermixed_args``."""
    parser.add_argument(
        "--config",
        required=True,
        metavar="NAME",
        help="a YAML file, or the name of a shipped config",
    )
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="dotted keys, such as dpo.beta=0.05"
    )


def positive(text: str) -> int:
    """A number of things of which there must be one at least."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value}: give at least 1")
    return value
