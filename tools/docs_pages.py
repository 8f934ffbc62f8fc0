"""Pages and pictures of the site that the code makes: a hook of mkdocs.

``keys.md`` has every config key, and the pictures are those of the commands that the pages name.
The planner's tables for a declared cluster take longer than a build should: they are checked in.

    python tools/docs_pages.py docs  # writes sizing.md and scaling.png there
"""

import io
import re
import sys
import tempfile
from collections.abc import Sequence
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
SIZED = {
    "dpo_7b": "2,4,8,16,32,64",
    "ppo_7b": "8,16,32",
    "dpo_70b": "32,64,128",
    "ppo_33b_7b": "32,64,128",
}


def on_files(files: Any, config: Any) -> Any:
    """Add the made pages and pictures to the site's files."""
    from mkdocs.structure.files import File

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for picture, command in PICTURES.items():
            run(*command, str(folder / picture))
            content = (folder / picture).read_bytes()
            files.append(File.generated(config, picture, content=content))
    files.append(File.generated(config, "keys.md", content=keys()))
    files.append(File.generated(config, "coming.md", content=elsewhere()))
    return files


def run(command: str, *arguments: str) -> str:
    """The output of a ``puzzle-align`` command."""
    with redirect_stdout(io.StringIO()) as output:
        import_module(f"puzzle_align.cli.{command}").main(arguments)
    return output.getvalue()


def sizing(folder: Path) -> None:
    """Write the page of plans by number of GPUs, and its picture."""
    parts = [_SIZING]
    with tempfile.TemporaryDirectory() as scratch:
        for name, numbers in SIZED.items():
            profile = f"{scratch}/{name}.json"
            run("profile", "--declare", "h100", "--config", name, "--output", profile)
            drawn = ("--png", str(folder / "scaling.png")) if name == "dpo_7b" else ()
            command = ("plan", "--config", name, "--gpus", numbers, "--profile")
            shown = run(*command, profile, *drawn)
            words = " ".join((*command, f"{name}.json"))
            parts += [f"## {name}", f"    puzzle-align {words}", _plans(shown)]
    (folder / "sizing.md").write_text("\n\n".join(parts) + "\n", encoding="utf-8")


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

![dpo_7b on 2 to 64 GPUs](scaling.png)"""


def keys() -> str:
    """The page of all config keys, section by section."""
    sections: dict[str, list[Key]] = {"": []}
    docs = {"": "Keys without a section."}
    for key in all_keys(JobConfig):
        if key.is_section:
            stages = f" Stages: {', '.join(key.stages)}." if key.stages else ""
            sections[key.name] = []
            docs[key.name] = f"{key.doc[:1].upper()}{key.doc[1:]}.{stages}"
        else:
            sections.setdefault(key.name.rpartition(".")[0], []).append(key)
    parts = ["# Every key", "Stages that read a key, or a section, are named where not all do."]
    for name, held in sections.items():
        if held:
            parts += [f"## {name or 'The job'}", docs.get(name, ""), _table(held)]
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
name is an error that says ours. Dotted names are verl's and NeMo-RL's, bare ones TRL's. `beta` is
that of GRPO; of DPO's and KTO's trainers it is `dpo.beta` and `kto.beta`. Some values differ in
kind: `warmup_ratio` is a share, ours are steps; `ppo_mini_batch_size` is a size, ours a number."""


def _table(held: Sequence[Key]) -> str:
    rows = ["| key | default | values | meaning |", "|---|---|---|---|"]
    for key in held:
        values = ", ".join(map(str, key.choices)) or key.unit or kind_of(key.hint).words
        cells = (f"`{key.name.rpartition('.')[2]}`", f"`{written(key.default)}`", values, key.doc)
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(rows)


if __name__ == "__main__":
    sizing(Path(sys.argv[1]))
