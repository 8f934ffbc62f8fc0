"""Pages and pictures of the site that the code makes: a hook of mkdocs.

``keys.md`` has every config key, ``sizing.md`` the planner's tables for a declared cluster, and the
pictures are those of the commands that the pages name. Tables whose search takes longer than a
build should are checked in:

    python tools/docs_pages.py > docs/sizing_large.md
"""

import io
import re
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from importlib import import_module
from pathlib import Path
from typing import Any

from puzzle_align.cli.arguments import written
from puzzle_align.config.elsewhere import NAMES
from puzzle_align.config.job import JobConfig
from puzzle_align.config.schema import Key, all_keys
from puzzle_align.files.typed import kind_of

PIPELINE = "actor.parallel.pipeline_model_parallel_size=4"
SCHEDULE = ("inspect", "schedule", "--config", "dpo_7b", PIPELINE, "--microbatches", "4")
PICTURES = {
    "schedule.png": (*SCHEDULE, "--steps", "2", "--compare", "--png"),
    "traffic.png": ("inspect", "reshard", "--config", "ppo_7b", "--png"),
}
SIZED = {"dpo_7b": "2,4,8,16,32,64", "ppo_7b": "8,16,32"}
SIZED_LARGE = {"dpo_70b": "32,64,128", "ppo_33b_7b": "32,64,128"}


def on_files(files: Any, config: Any) -> Any:
    """Add the made pages and pictures to the site's files."""
    from mkdocs.structure.files import File

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for picture, command in PICTURES.items():
            run(*command, str(folder / picture))
            content = (folder / picture).read_bytes()
            files.append(File.generated(config, picture, content=content))
        files.append(File.generated(config, "sizing.md", content=sizing(folder)))
        content = (folder / "scaling.png").read_bytes()
        files.append(File.generated(config, "scaling.png", content=content))
    files.append(File.generated(config, "keys.md", content=keys()))
    files.append(File.generated(config, "coming.md", content=elsewhere()))
    return files


def run(command: str, *arguments: str) -> str:
    """The output of a ``puzzle-align`` command."""
    with redirect_stdout(io.StringIO()) as output:
        import_module(f"puzzle_align.cli.{command}").main(arguments)
    return output.getvalue()


def sizing(folder: Path) -> str:
    """The page of plans by number of GPUs; draws ``scaling.png``."""
    return "\n\n".join((_SIZING, *tables(SIZED, folder)))


def large() -> str:
    """The page of plans for large models."""
    with tempfile.TemporaryDirectory() as name:
        return "\n\n".join((_LARGE, *tables(SIZED_LARGE, Path(name)))) + "\n"


def tables(sized: Mapping[str, str], folder: Path) -> list[str]:
    """For each config a heading, the command, and the planner's table of it."""
    parts = []
    for name, numbers in sized.items():
        profile = str(folder / f"{name}.json")
        run("profile", "--declare", "h100", "--config", name, "--output", profile)
        drawn = ("--png", str(folder / "scaling.png")) if name == "dpo_7b" else ()
        command = ("plan", "--config", name, "--gpus", numbers)
        shown = run(*command, "--profile", profile, *drawn)
        parts += [f"## {name}", f"    puzzle-align {' '.join(command)} ...", _plans(shown)]
    return parts


def _plans(shown: str) -> str:
    """The table that ``plan`` prints for several numbers of ranks."""
    rows = ["| GPUs | iteration | examples/s | efficiency | limited by | plan |"]
    rows.append("|---|---|---|---|---|---|")
    for line in shown.splitlines():
        if found := re.match(r" +(\d+) +(\S+ \S+) +(\S+) +(\d+%) +(.*?); (actor .*)", line):
            cells = (cell.replace("|", "\\|") for cell in found.groups())
            rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


_SIZING = """# Which plan, and how many GPUs

!!! warning "Declared, not measured"
    These tables are the planner's, for 80 GB H100s with the figures of their data sheet:
    `puzzle-align profile --declare h100`. Nothing in them was measured. A profile of your own
    cluster (`launch/profile.py`) makes them yours: [Plan](planning.md).

Efficiency is throughput a GPU against the smallest number that fits. The plan is pipeline (P), data
(D) and tensor (T) size.
[Larger models](sizing_large.md) have a page of their own.

![dpo_7b on 2 to 64 GPUs](scaling.png)"""

_LARGE = """# Plans for large models

!!! warning "Declared, not measured"
    As on [the page for 7B models](sizing.md), these tables are the planner's, for 80 GB H100s with
    the figures of their data sheet. Nothing in them was measured."""


def keys() -> str:
    """The page of all config keys, section by section."""
    sections: dict[str, list[Key]] = {"": []}
    docs = {"": "Keys without a section."}
    for key in all_keys(JobConfig):
        if key.is_section:
            sections[key.name], docs[key.name] = [], f"{key.doc[:1].upper()}{key.doc[1:]}."
        else:
            sections.setdefault(key.name.rpartition(".")[0], []).append(key)
    parts = ["# Every key", "Stages that read a key, or a section, are named where not all do."]
    for name, held in sections.items():
        if held:
            parts += [
                f"## {name or 'The job'}",
                _with_stages(docs.get(name, ""), name),
                _table(held),
            ]
    return "\n\n".join(part for part in parts if part)


def elsewhere() -> str:
    """The page of the names that our keys have in other libraries."""
    docs = {key.name: key.doc for key in all_keys(JobConfig)}
    rows = ["| there | here | meaning |", "|---|---|---|"]
    rows += [
        f"| `{name}` | `{ours}` | {docs[ours]} |" for ours, names in NAMES.items() for name in names
    ]
    return "\n\n".join((_ELSEWHERE, "\n".join(rows)))


_ELSEWHERE = """# Coming from TRL, verl or NeMo-RL

Names that these libraries give to keys of ours. Written in a config or an override here, such a
name is an error that says ours. Dotted names are verl's and NeMo-RL's, bare ones TRL's."""


def _with_stages(text: str, name: str) -> str:
    stages = next((key.stages for key in all_keys(JobConfig) if key.name == name), ())
    return f"{text} Stages: {', '.join(stages)}." if stages else text


def _table(held: Sequence[Key]) -> str:
    rows = ["| key | default | values | meaning |", "|---|---|---|---|"]
    for key in held:
        values = ", ".join(map(str, key.choices)) or key.unit or kind_of(key.hint).words
        cells = (f"`{key.name.rpartition('.')[2]}`", f"`{written(key.default)}`", values, key.doc)
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(rows)


if __name__ == "__main__":
    sys.stdout.write(large())
