"""Arguments shared by several commands, and every config key as help text."""

import argparse
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from puzzle_align.config.chosen_plan import decided_keys, refuse_overrides, with_plan
from puzzle_align.config.elsewhere import NAMES
from puzzle_align.config.job import JobConfig
from puzzle_align.config.load import find_config, load_file
from puzzle_align.config.resolution import Resolution
from puzzle_align.config.schema import Key, all_keys, is_among
from puzzle_align.files.messages import shown
from puzzle_align.files.typed import kind_of
from puzzle_align.planning.plan_file import GivenPlan, open_plan

WIDTH = 96
_INDENT = " " * 6


def command_parser(
    prog: str, metavar: str, description: str, commands: Mapping[str, tuple[object, str]]
) -> argparse.ArgumentParser:
    """Make the parser of ``chosen``, one of ``commands``, and its ``arguments``.

    Args:
        commands: with a line on what each does.
    """
    width = max(map(len, commands))
    lines = (f"  {name:<{width}}  {line}" for name, (_, line) in commands.items())
    parser = argparse.ArgumentParser(
        prog=prog,
        description=f"{description} '{prog} {metavar} --help' says more.",
        epilog="\n".join((f"{metavar} is one of:", *lines)),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("chosen", choices=commands, metavar=metavar, help="see below")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help=f"arguments of the {metavar}")
    return parser


def add_config(parser: argparse.ArgumentParser) -> None:
    """Add ``--config NAME [key=value ...]``, to be parsed with ``parse_intermixed_args``."""
    parser.add_argument(
        "--config",
        required=True,
        metavar="NAME",
        help="a YAML file, or the name of a shipped config",
    )
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="dotted keys, such as dpo.beta=0.05"
    )
    parser.add_argument(  # read by ``cli.main.process``
        "--debug", action="store_true", help="show the traceback of an error in your own function"
    )


def add_job(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``add_config``, and ``--plan FILE``."""
    add_config(parser)
    parser.add_argument(
        "--plan",
        type=Path,
        metavar="FILE",
        help="a plan.json: the job runs by it as it is, and a job that it does not fit is refused",
    )


def read_job(args: argparse.Namespace) -> tuple[JobConfig, GivenPlan | None]:
    """Read the job of ``add_job``'s arguments, and its plan file, if any.

    Raises:
        ValueError: one line, for a wrong key, or an invalid plan file or one of another stage.
    """
    plan = None if args.plan is None else open_plan(args.plan)
    config = load_file(find_config(args.config), args.overrides)
    if plan is None:
        return config, None
    config = with_plan(config, plan)
    refuse_overrides(args.overrides, plan.source, decided_keys(config.stage, plan.plan.models))
    return config, plan


def ranks_to_show(asked: int | None, job: JobConfig, plan: GivenPlan | None) -> int:
    """Number of ranks for showing a job: ``asked``, else the plan's, else the config's.

    The fewest that the job needs, if the config states no number or fewer.

    Raises ValueError, one line, if the plan is for another number than ``asked``.
    """
    if plan is None:
        return asked or max(job.engine.world_size or 1, Resolution(job).smallest_world_size())
    if asked:
        plan.check_world_size(asked)
    return plan.plan.world_size


def positive(text: str) -> int:
    """Parse a whole number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{shown(text)}: give a whole number of at least 1")
    return int(text)


def positives(text: str) -> tuple[int, ...]:
    """Parse whole numbers of at least 1, as ``1,2,4``."""
    return tuple(positive(part) for part in text.split(","))


def describe_keys(only: tuple[str, ...] = ()) -> str:
    """Describe config keys: name, default, unit or choices, one line of doc each (wrapped).

    ``only`` limits them to these keys and sections; empty: all keys, with the stages that read them
    unless all do (for a section, in the section's line).
    """
    lines = ["config keys, with their defaults:"]
    stages: dict[str, tuple[str, ...]] = {}  # by key described so far
    for key in all_keys(JobConfig):
        if only and not is_among(key.name, only):
            continue
        stages[key.name] = () if only else key.stages
        outer = stages.get(key.name.rpartition(".")[0], ())
        named = stages[key.name] if stages[key.name] != outer else ()
        lines += ["", *_section_lines(key, named)] if key.is_section else _value_lines(key, named)
    return "\n".join(lines)


def _section_lines(key: Key, stages: tuple[str, ...]) -> list[str]:
    read = f" ({_stages(stages)})" if stages else ""
    return textwrap.wrap(
        f"{key.name}: {key.doc}{read}", WIDTH, initial_indent="  ", subsequent_indent=_INDENT
    )


def _value_lines(key: Key, stages: tuple[str, ...]) -> list[str]:
    kind = " | ".join(key.choices) or key.unit or kind_of(key.hint).words
    read = f"; {_stages(stages)}" if stages else ""
    read += f"; elsewhere {', '.join(NAMES[key.name])}" if key.name in NAMES else ""
    return [
        f"  {key.name}={written(key.default)}",
        *textwrap.wrap(
            f"{key.doc} ({kind}{read})", WIDTH, initial_indent=_INDENT, subsequent_indent=_INDENT
        ),
    ]


def _stages(stages: tuple[str, ...]) -> str:
    return f"stage {' or '.join(stages)}"


def written(value: Any) -> str:
    """Format a default as YAML."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)
