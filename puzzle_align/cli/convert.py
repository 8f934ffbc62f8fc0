"""``puzzle-align convert``: convert a checkpoint's model to a Hugging Face directory, or back."""

import argparse
from collections.abc import Sequence
from pathlib import Path


def main(arguments: Sequence[str]) -> None:
    """Convert, on one process; ValueError if the input is wrong or the output exists."""
    parser = _parser()
    args = parser.parse_args(arguments)
    if args.to_checkpoint and (args.merge or args.role is not None):
        parser.error("--role and --merge are for a checkpoint's model, not for --to-checkpoint")
    from puzzle_align.commands import convert, summary

    if args.to_checkpoint:
        convert.to_checkpoint(args.source, args.out)
    else:
        convert.to_hf(args.source, args.out, args.role, merge=args.merge)
    summary.say(f"wrote {args.out}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="puzzle-align convert",
        description="Turn a checkpoint's model into a directory that transformers loads, or back.",
    )
    parser.add_argument(
        "source",
        type=Path,
        metavar="CHECKPOINT",
        help="a checkpoint's directory (with --to-checkpoint: a Hugging Face model's)",
    )
    parser.add_argument("out", type=Path, metavar="OUT", help="the directory to write")
    parser.add_argument(
        "--role",
        help="a model of the checkpoint (default: the one that its stage is for; of ppo the actor)",
    )
    parser.add_argument(
        "--merge",
        action="store_true",
        help="of a model with adapters, write the merged model (default: a PEFT directory)",
    )
    parser.add_argument(
        "--to-checkpoint",
        action="store_true",
        help="the other way: from a Hugging Face directory to a checkpoint",
    )
    return parser
