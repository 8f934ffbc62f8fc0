"""The site builds without a warning, and the tutorial does what it says."""

import ast
import html
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from puzzle_align.config.elsewhere import NAMES
from puzzle_align.config.job import JobConfig
from puzzle_align.config.schema import all_keys
from puzzle_align.config.sections.preference import PREFERENCE_LOSSES

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site in mkdocs' own theme, which needs no more than mkdocs."""
    return built(tmp_path_factory.mktemp("site"), "--theme", "mkdocs")


def built(folder: Path, *options: str) -> Path:
    """Build the site in a folder; strict: a dead link, anchor or picture is an error."""
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", *options, "--site-dir", str(folder)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return folder


def test_pages_have_their_pictures(site: Path) -> None:
    for picture in ("schedule.png", "traffic.png", "scaling.png", "report.png"):
        assert (site / picture).read_bytes()[:4] == b"\x89PNG"


@pytest.mark.slow
def test_pages_in_their_own_theme_ask_no_other_host(tmp_path: Path) -> None:
    pytest.importorskip("material", reason="needs the theme: pip install -e .[docs]")
    pages = [*built(tmp_path).rglob("*.html")]
    assert len(pages) > 20
    for page in pages:
        text = page.read_text(encoding="utf-8")
        assert not re.findall(r'<(?:script|link|img)[^>]+(?:src|href)="https?://[^"]+"', text), page


def test_the_page_of_keys_has_every_key_with_its_meaning(site: Path) -> None:
    text = html.unescape((site / "keys" / "index.html").read_text(encoding="utf-8"))
    keys = [key for key in all_keys(JobConfig) if not key.is_section]
    assert len(keys) > 100
    for key in keys:
        section, _, name = key.name.rpartition(".")
        part = text.partition(f">{section or 'The job'}</h2>")[2].partition("<h2")[0]
        assert f"<code>{name}</code>" in part and key.doc in part, key.name


def test_the_page_of_names_elsewhere_has_them_all(site: Path) -> None:
    text = (site / "coming" / "index.html").read_text(encoding="utf-8")
    pairs = [(name, ours) for ours, names in NAMES.items() for name in names]
    assert len(pairs) > 40
    for name, ours in pairs:
        assert re.search(rf"<code>{re.escape(name)}</code></td>\s*<td><code>{ours}</code>", text), (
            name
        )


def test_the_page_of_sizes_has_the_planner_s_rows(site: Path) -> None:
    text = html.unescape((site / "sizing" / "index.html").read_text(encoding="utf-8"))
    rows = re.findall(r"<td>(\d+)</td>\s*<td>\S+ m?s</td>\s*<td>[^<]+</td>\s*<td>\d+%", text)
    assert [*map(int, rows)] == [2, 4, 8, 16, 32, 64, 8, 16, 32, *(32, 64, 128) * 2]
    assert "Declared, not measured" in text


@pytest.mark.slow
def test_the_page_of_sizes_is_what_the_planner_says(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "tools/docs_pages.py", str(tmp_path)], cwd=ROOT, check=True)
    made, kept = (folder / "sizing.md" for folder in (tmp_path, ROOT / "docs"))
    assert made.read_text(encoding="utf-8") == kept.read_text(encoding="utf-8")
    assert (tmp_path / "scaling.png").read_bytes()[:4] == b"\x89PNG"


def templates() -> list[str]:
    """Every text that the package can write, with ``…`` for each value in it; no docstrings."""
    found = []
    for file in (ROOT / "puzzle_align").rglob("*.py"):
        nodes = {*ast.walk(ast.parse(file.read_text(encoding="utf-8")))}
        nodes -= {node.value for node in nodes if isinstance(node, ast.Expr)}  # docstrings
        for node in nodes:
            if isinstance(node, ast.JoinedStr):
                parts = [p.value if isinstance(p, ast.Constant) else "…" for p in node.values]
                found.append("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return found


def quoted_errors() -> list[str]:
    """The texts in the first column of the page's tables, without those of other programs."""
    text = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    return re.findall(r"^\| `([^`]+)`(?! \((?:torch|torchrun)'s\))", text, re.MULTILINE)


def test_the_page_of_losses_has_them_all() -> None:
    page = (ROOT / "docs/losses.md").read_text()
    rows = {name for line in page.splitlines() for name in line.split("|")[1:2]}
    named = {name.strip("` ") for row in rows for name in row.split(",")}
    assert {*PREFERENCE_LOSSES} <= named


def test_errors_that_troubleshooting_quotes_are_those_of_the_code() -> None:
    known, quoted = templates(), quoted_errors()
    assert len(quoted) > 50
    assert not [text for text in quoted if not any(map(pattern_of(text).search, known))]


def pattern_of(quoted: str) -> re.Pattern[str]:
    """A regular expression of a quoted text, whose ``…`` stand for anything.

    A signal's name is a value in the code.
    """
    pieces = (re.sub("SIG[A-Z]+", "…", re.escape(piece)) for piece in quoted.split("…"))
    return re.compile(".*".join(pieces))


def tutorial_commands() -> list[list[str]]:
    """The tutorial's commands that run on a laptop, in order."""
    text = (ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8").replace("\\\n", " ")
    lines = [line.strip() for line in text.splitlines() if line.startswith("    ")]
    return [shlex.split(line) for line in lines if not re.match(r"source |.*dpo_7b", line)]


@pytest.mark.slow
def test_the_tutorial_runs(tmp_path: Path) -> None:
    first, *others = tutorial_commands()
    assert first == ["bash", "launch/quickstart.sh"] and len(others) == 7
    train = ["torchrun", "--nproc-per-node", "2", "launch/train.py", "--config", "dpo_tiny"]
    folder = str(Path(sys.executable).parent)
    environment = {**os.environ, "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}
    (tmp_path / "launch").symlink_to(ROOT / "launch")
    for words in (train, *others):
        done = subprocess.run(
            words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600
        )
        assert done.returncode == 0, (words, done.stdout, done.stderr)
    assert (tmp_path / "runs" / "dpo_tiny_hf" / "model.safetensors").is_file()
