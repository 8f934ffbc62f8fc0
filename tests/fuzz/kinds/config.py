"""Configs: YAML damaged as text and as values, and overrides, through all of ``--validate``.

The data alone is left out. What is accepted is what another reader of YAML finds under every key.
"""

import json
import random
import re
from datetime import date
from importlib import import_module
from pathlib import Path
from typing import Any

import yaml

from puzzle_align.commands import validate
from puzzle_align.config.check import problems, raise_first
from puzzle_align.config.job import JobConfig
from puzzle_align.config.load import CONFIG_FOLDERS, load_file
from puzzle_align.config.placement import smallest_world_size
from puzzle_align.config.schema import all_keys, key_values
from puzzle_align.config.stages import STAGES
from puzzle_align.stages.inputs import attempt, check_inputs, to_resume
from tests.fuzz.harness import Case
from tests.fuzz.mutate import damaged_bytes
from tests.fuzz.values import KEYS, changed_json, nasty

_LAUGHS = "".join(f"l{n + 1}: &l{n + 1} [{', '.join([f'*l{n}'] * 9)}]\n" for n in range(20))
SNIPPETS = (
    "seed: &a [*a]\n",
    "actor: &a {model: {config: {x: *a}}}\n",
    f"l0: &l0 [lol]\n{_LAUGHS}actor: {{model: {{config: {{x: *l20}}}}}}\n",
    "<<: *nothing\n",
    "defaults: &d {lr: 1e-5}\noptimizer: {<<: *d}\n",
    "seed: !!int ''\n",
    "seed: !!int 0x\n",
    "seed: !!timestamp x\n",
    "seed: !!bool x\n",
    "seed: !!float ''\n",
    "seed: !!binary =\n",
    "seed: !!python/object/apply:os.system [touch mark]\n",
    "seed: !!python/name:os.system\n",
    "seed: !own {a: 1}\n",
    "!!set {seed}\n",
    "dpo: !!omap [beta: 1]\n",
    "%YAML 1.1\n---\nseed: 1\n",
    "%YAML 9999999999.1\n---\nseed: 1\n",
    "seed: 2026-01-01\n",
    "output_dir: 2026-01-01\n",
    "output_dir: !!str 7\n",
    "output_dir: =\n",
    "seed: 0o17\n",
    "seed: 017\n",
    "seed: 1:30\n",
    "seed: 1_000\n",
    "seed: 0x" + "f" * 3000 + "\n",
    "seed: " + "9" * 5000 + "\n",
    "seed: .inf\n",
    "dpo: {beta: .nan}\n",
    "dpo: {beta: 1e999}\n",
    "dpo: {beta: yes}\n",
    "dpo: []\n",
    "dpo:\n",
    "dpo: {}\n",
    "null: 1\n",
    "1: 2\n",
    "[a]: 1\n",
    "{a: 1}: 1\n",
    "? - a\n: 1\n",
    'output_dir: "a\\0b"\n',
    'output_dir: "\\ud800"\n',
    'output_dir: "\\U00110000"\n',
    'output_dir: "a\\nb"\n',
    "output_dir: |\n a\n b\n",
    f"output_dir: {'x' * 300}\n",
    f"output_dir: {'x/' * 3000}\n",
    "actor: {model: {config: {architectures: 7}}}\n",
    "actor: {model: {path: '/'}}\n",
    "actor: {model: {path: ''}}\n",
    "actor: {parallel: {pipeline_model_parallel_size: 1000000}}\n",
    "actor: {parallel: {data_parallel_size: 2147483647}}\n",
    "reward: {ranks: 0-99999999999999999999}\n",
    "stage: ppo\nactor: {ranks: 0-2000000000}\n",
    "global_batch_size: 1000000000000000000\n",
    "max_steps: 1000000000000000000000000000000\n",
    "seed: 1\n---\nseed: 2\n",
    "seed: 1\n...\n",
    "seed: 1\nseed: 2\n",
    "\ufeffseed: 1\n",
    "seed: \x00\n",
    "seed: \x1b[31m\n",
    "\t\n",
    "seed: *\n",
    "seed: &\n",
    "a: " * 50 + "\n",
    "x: " + "[" * 900 + "]" * 900 + "\n",
    "- " * 900 + "\n",
    "x: " + "{a: " * 900 + "}" * 900 + "\n",
    "seed: " + "x" * 200_000 + "\n",
    "# " + "x" * 100_000 + "\n",
    "x: [" + "1," * 50_000 + "]\n",
)


class _Reader(yaml.CSafeLoader):
    """libyaml's parser, PyYAML's values; and ``1e-6`` is a number."""


_Reader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?[0-9]+\.?[0-9]*[eE][-+]?[0-9]+$"),
    list("-+0123456789"),
)


class Kind:
    """See ``harness.Kind``."""

    limit_s = 8.0
    imports = ("puzzle_align.stages.rl.preview", "puzzle_align.stages.preference.preview")

    def __init__(self, folder: Path) -> None:
        shipped = next(own for own in CONFIG_FOLDERS if own.is_dir())
        self.texts = [path.read_text() for path in sorted(shipped.glob("*.yaml"))]
        self.trees = [yaml.load(text, Loader=_Reader) for text in self.texts]
        self.names = [key.name for key in all_keys(JobConfig)]
        self.file = folder / "job.yaml"

    def case(self, draw: random.Random) -> Case:
        """A shipped config with something done to it, and perhaps overrides."""
        what, data = self._file(draw)
        self.file.write_bytes(data)
        overrides = [self._override(draw) for _ in range(draw.choice((0, 0, 0, 1, 2)))]
        return Case(
            f"{what}; overrides {[own[:60] for own in overrides]}",
            lambda: _use(self.file, overrides),
            lambda job: _wrong(job, data, overrides),
        )

    def _file(self, draw: random.Random) -> tuple[str, bytes]:
        number, kind = draw.randrange(len(self.texts)), draw.random()
        if kind < 0.15:
            return "as it is", self.texts[number].encode()
        if kind < 0.3:
            return damaged_bytes(draw, self.texts[number].encode())
        if kind < 0.5:
            snippet = draw.choice(SNIPPETS)
            lines = self.texts[number].splitlines(keepends=True)
            lines[:] = [] if draw.random() < 0.3 else lines
            lines.insert(draw.randrange(len(lines) + 1), snippet)
            return f"{snippet[:40]!r} put in", "".join(lines).encode(errors="surrogatepass")
        tree = self.trees[number]
        if kind < 0.7:  # at some key, whether the config has it or not
            name = draw.choice(self.names)
            tree = _with(tree, name, None)
            what, text = f"{name} with", json.dumps(nasty(draw, draw.choice((1, 0.5, "x", True))))
            written = json.dumps(_with(tree, name, "@value@")).replace('"@value@"', text)
            return f"{what} {text[:60]}", written.encode()
        what, text = changed_json(draw, tree)
        return what, text.encode(errors="surrogatepass")

    def _override(self, draw: random.Random) -> str:
        name = draw.choice(self.names)
        if draw.random() < 0.15:
            name = draw.choice((f"{name}.x", f"{name}.", f".{name}", "", ".", *KEYS, "a." * 5000))
        value = nasty(draw, draw.choice((1, 0.5, "x", True, [1], {"a": 1})))
        text = value if isinstance(value, str) else json.dumps(value)
        return f"{name}={text}"


def _use(file: Path, overrides: list[str]) -> JobConfig:
    """What ``--validate`` does, without the data."""
    job = load_file(file, overrides)
    world_size = smallest_world_size(job)
    found = problems(job, world_size)
    attempt(found, lambda: to_resume(job))
    if not found:
        engine = validate.resolve_engine(job.engine, elsewhere=True)
        plan = attempt(found, lambda: validate.plan_job(job, engine, world_size))
        found += check_inputs(job)
        if plan is not None:
            validate._show_models(job, plan)
            stage = import_module(f"{STAGES[job.stage].package}.preview")
            preview = stage.preview(job, plan, None, found)
            validate._show_memory(job, plan, preview, engine.device)
    raise_first(sorted(found, key=lambda line: (-len(line.splitlines()), -len(line))))
    return job


def _wrong(job: JobConfig, data: bytes, overrides: list[str]) -> str | None:
    """The first key that is not as another reader has it."""
    tree = yaml.load(data.decode(), Loader=_Reader) or {}
    for override in overrides:
        name, _, value = override.partition("=")
        tree = _with(tree, name, yaml.load(value, Loader=_Reader))
    for key, value in key_values(job):
        if key.is_section:
            continue
        there, wanted = _at(tree, key.name)
        expected = _as(wanted, key.items or key.type) if there else key.default
        if expected != value or (type(expected) is not type(value)):
            return f"{key.name} is {value!r}, not {expected!r}"
    return None


def _as(value: Any, kind: type) -> Any:
    """A value as a key of a type has it."""
    if isinstance(value, list):
        return [_as(item, kind) for item in value]
    if kind is float and value is not None:
        return float(value)
    return value.isoformat() if isinstance(value, date) else value


def _at(tree: Any, name: str) -> tuple[bool, Any]:
    """Whether there is something under a dotted name, and what."""
    for part in name.split("."):
        if not isinstance(tree, dict) or part not in tree:
            return False, None
        tree = tree[part]
    return True, tree


def _with(tree: Any, name: str, value: Any) -> Any:
    """A copy of the tree with something under a dotted name."""
    first, _, rest = name.partition(".")
    tree = dict(tree) if isinstance(tree, dict) else {}
    tree[first] = _with(tree.get(first), rest, value) if rest else value
    return tree
