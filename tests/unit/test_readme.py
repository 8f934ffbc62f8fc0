"""The training commands that README and the configs' headers give are sound as they stand there."""

import json
import re
import shlex
import subprocess
import textwrap
from importlib import import_module
from pathlib import Path

import pytest
import yaml

from puzzle_align.config.job import JobConfig
from puzzle_align.config.load import find_config, load_file
from puzzle_align.layout.hf_config import to_hf_config
from puzzle_align.layout.model import ModelSpec, with_scalar_head
from tests.jobs import model_of, problems_of

ROOT = Path(__file__).parents[2]
DOCS = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
TEXTS = (*DOCS, *sorted((ROOT / "configs").glob("*.yaml")))
# How many a launcher starts: the flag that says so, the ranks of each, and what it is without.
LAUNCHERS = {
    "launch/train.py": ("--nproc-per-node", 1, 1),
    "launch/train.sbatch": ("--nodes", 8, 8),
}


def commands(path: Path) -> list[list[str]]:
    """The words of every training command of a text, which stand indented."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".yaml":
        header = [line[1:] for line in text.splitlines() if line.startswith("#")]
        text = "\n".join(header)
    lines = text.replace("\\\n", " ").splitlines()
    launched = (line for line in lines if line.startswith("  ") and "launch/train." in line)
    return [shlex.split(line) for line in launched]


def spec_of(job: JobConfig, role: str) -> ModelSpec:
    """Model spec of a role that a command may name."""
    if getattr(job, role).has_model:
        return model_of(job, role).spec
    return with_scalar_head(model_of(job, "actor").spec)


def command_problems(words: list[str], folder: Path) -> list[str]:
    """The problems of a command, with models in ``folder`` for those that it names."""
    (launcher,) = LAUNCHERS.keys() & set(words)
    flag, ranks_each, number = LAUNCHERS[launcher]
    if flag in words:
        number = int(words[words.index(flag) + 1])
    config = find_config(words[words.index("--config") + 1])
    overrides = words[words.index("--config") + 2 :]
    for place, override in enumerate(overrides):
        if found := re.match(r"(\w+)\.model\.path=", override):
            model = folder / found[1]
            model.mkdir()
            described = to_hf_config(spec_of(load_file(config), found[1]))
            (model / "config.json").write_text(json.dumps(described))
            overrides[place] = f"{found[0]}{model}"
    return problems_of(load_file(config, overrides), number * ranks_each)


def indented(path: Path, start: str) -> list[list[str]]:
    """The words of every command of a page that begins so."""
    lines = path.read_text(encoding="utf-8").replace("\\\n", " ").splitlines()
    shown = (line.strip() for line in lines if line.startswith("    "))
    return [shlex.split(line, comments=True) for line in shown if line.startswith(start)]


def test_there_are_commands() -> None:
    assert all(commands(path) for path in TEXTS if path.suffix == ".yaml")
    assert sum(len(commands(path)) for path in DOCS) >= 8
    assert sum(len(indented(path, "puzzle-align ")) for path in DOCS) >= 10


@pytest.mark.parametrize(
    "words", [pytest.param(words, id=path.stem) for path in TEXTS for words in commands(path)]
)
def test_a_command_that_is_shown_is_sound(words: list[str], tmp_path: Path) -> None:
    assert command_problems(words, tmp_path) == []


@pytest.mark.parametrize(
    "words",
    [pytest.param(w, id=path.stem) for path in DOCS for w in indented(path, "puzzle-align ")],
)
def test_the_command_line_takes_what_is_shown(words: list[str]) -> None:
    _, command, *arguments = words
    name = "_parser"
    if command == "inspect":
        subject, *arguments = arguments
        name = f"_{subject}_parser"
    parser = getattr(import_module(f"puzzle_align.cli.{command}"), name)()
    args = parser.parse_intermixed_args(arguments)
    if getattr(args, "config", None) is not None:
        load_file(find_config(args.config), args.overrides)


BLOCK = re.compile(r"(?:^    .*\n(?:\n(?=    ))?)+", re.MULTILINE)
ADMONITION = re.compile(r"^!!! .*\n(?:    .*\n)+", re.MULTILINE)
FENCED = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def code_blocks(path: Path) -> list[tuple[str, str]]:
    """Language and text of every code block of a page; one that is only indented is Python or a
    shell's.
    """
    text = ADMONITION.sub("", path.read_text(encoding="utf-8"))
    fenced = [(language, block) for language, block in FENCED.findall(text)]
    blocks = [textwrap.dedent(block) for block in BLOCK.findall(FENCED.sub("", text))]
    python = re.compile(r"(?:#.*\n)?(?:from|import|def) ")
    return fenced + [("python" if python.match(block) else "bash", block) for block in blocks]


@pytest.mark.parametrize("path", DOCS, ids=lambda path: path.stem)
def test_every_code_block_is_sound(path: Path) -> None:
    for language, block in code_blocks(path):
        if language == "python":
            compile(block, str(path), "exec")
        elif language == "yaml":
            assert list(yaml.safe_load_all(block))
        else:
            assert language == "bash"
            done = subprocess.run(["bash", "-n"], input=block, capture_output=True, text=True)
            assert done.returncode == 0, done.stderr
            for file in re.findall(r"(?<!\S)(?:launch|tests|tools)/\S+\.(?:py|sh|sbatch)", block):
                assert (ROOT / file).is_file(), file


@pytest.mark.parametrize("path", DOCS, ids=lambda path: path.stem)
def test_no_command_stands_outside_a_code_block(path: Path) -> None:
    """Markdown would run such a line, and those indented below it, into one paragraph."""
    lines = path.read_text(encoding="utf-8").splitlines()
    names = ("torchrun ", "puzzle-align ", "python ", "bash ", "pip ")
    assert not [line for line in lines if line.startswith(names) or re.match(r"\S.*\\$", line)]


def test_one_place_says_what_is_unmeasured_over_nccl() -> None:
    texts = {path.name: path.read_text(encoding="utf-8").splitlines() for path in DOCS}
    lines = [(name, line) for name, text in texts.items() for line in text]
    ((name, line),) = (each for each in lines if "unmeasured" in each[1] or "over NCCL" in each[1])
    assert name == "README.md"
    assert "Plans of several ranks (P, D or T above 1) over NCCL stay unmeasured" in line


def test_the_readme_is_short_and_its_links_lead_somewhere() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.split()) <= 900
    links = re.findall(r"\]\(([^)]+)\)", text)
    assert len(links) >= 12 and all((ROOT / link).is_file() for link in links)
