"""``puzzle-align generate``: responses of a model to prompts, as JSON lines."""

import argparse
import json
import textwrap
from collections.abc import Sequence
from pathlib import Path

from puzzle_align.cli.arguments import WIDTH, describe_keys
from puzzle_align.config.load import GENERATE_KEYS, check_generate_keys

_DESCRIPTION = (
    "Write a model's responses to prompts as JSON lines with prompt, response, tokens, log_probs "
    "and stopped beside the file's other columns, in the order of the prompts; one response a "
    "prompt, or generation.num_generations. Runs on the ranks that torchrun started, else on one. "
    "global_batch_size prompts are answered and written at a time. For a checkpoint, keys of "
    "tokenizer and generation that are not set come from its own job, as does "
    "data.apply_chat_template; data.max_length defaults to the model's limit."
)


def main(arguments: Sequence[str]) -> None:
    """Generate on the ranks that torchrun started; ValueError for a wrong argument or file."""
    args = _parser().parse_intermixed_args(arguments)
    check_generate_keys(args.overrides)
    if args.prompt_key is not None:
        if args.prompt:
            raise ValueError("--prompt-key: names a column of --prompts; leave it out")
        args.overrides.append(f"data.columns.prompt={json.dumps(args.prompt_key)}")
    from puzzle_align.commands import generate

    prompts = args.prompts or args.prompt
    generate.generate_responses(args.model, prompts, args.output, args.overrides, role=args.role)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="puzzle-align generate",
        description=textwrap.fill(_DESCRIPTION, WIDTH),
        epilog=describe_keys(GENERATE_KEYS),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--model",
        required=True,
        type=Path,
        metavar="DIR",
        help="a Hugging Face model's directory, or a checkpoint's (or of several: the latest)",
    )
    parser.add_argument(
        "--role",
        help="a model of the checkpoint (default: the one that its stage is for; of ppo the actor)",
    )
    prompts = parser.add_mutually_exclusive_group(required=True)
    prompts.add_argument(
        "--prompts",
        metavar="FILE",
        help="JSONL(.gz), JSON, CSV or Parquet file, datasets directory or hub name (NAME#SPLIT)",
    )
    prompts.add_argument(
        "--prompt", action="append", metavar="TEXT", help="a prompt; may be given several times"
    )
    parser.add_argument(
        "--prompt-key", metavar="NAME", help="the file's column of prompts: data.columns.prompt"
    )
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help="a new file to write; default: stdout"
    )
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="such as generation.temperature=0.7"
    )
    return parser
