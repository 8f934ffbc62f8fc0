"""Checkpoints: damaged files, files of other steps and jobs, other values, and hidden code.

What is accepted must be, in tensors, optimizer state and description, bit for bit what was saved;
where the checksums were made to agree with other values, the tensors.
"""

import gc
import hashlib
import io
import json
import os
import pickle
import random
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from puzzle_align.commands import generate
from puzzle_align.config.job import JobConfig
from puzzle_align.config.load import load_job
from puzzle_align.config.resolution import Resolution, RoleModel
from puzzle_align.config.resolve import Job
from puzzle_align.config.saved import Saved, find_checkpoint, open_checkpoint
from puzzle_align.config.sections.models import ModelConfig, RoleConfig
from puzzle_align.config.sections.optimizer import OptimizerConfig
from puzzle_align.files.checksums import sealed, unsealed
from puzzle_align.layout.hf_config import from_hf_config, to_hf_config
from puzzle_align.layout.model import ModelSpec
from puzzle_align.layout.plan import ParallelPlan
from puzzle_align.runtime.checkpoint.models import Trained, load_checkpoint, save_checkpoint
from puzzle_align.runtime.groups.world import World, init_distributed
from puzzle_align.stages.inputs import to_resume
from puzzle_align.stages.resuming import resume
from puzzle_align.stages.saving import job_metadata
from puzzle_align.stages.tokenizer import foreign_tokenizers
from puzzle_align.stages.trainer import Trainer
from puzzle_align.stages.weights import role_weights
from puzzle_align.telemetry import StepStats
from tests.checkpoints import reseal
from tests.dist.several_models import SPECS, Place, build, digest, optimizer_step
from tests.fuzz.harness import Case
from tests.fuzz.mutate import damaged_bytes, flipped
from tests.jobs import placed
from tests.unit.job_plans import context, phase_of, plan_of

SPEC: ModelSpec = SPECS["actor"]
RATE = 0.01
FIRST, LAST = 3, 6
NASTY: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 10**400, 2**63, 1.5, -0.0, 1e39, float("nan"), float("inf")),
    *("", "\0", "a\nb", "x" * 5000, "../..", "é", [], {}, [[]], [None], {"": None}, {"a": {}}),
)


class _Trainer(Trainer):
    """Parts of a stage that are saved and resumed."""

    num_steps, num_skipped, data_fingerprint = 9, 1, "none"

    def __init__(self, job: Job, world: World) -> None:
        self.job, self.world = job, world
        self.models = build({"actor": Place((0,))}, world, seed=5)
        self.plan = plan_of(phase_of(context("actor", ParallelPlan(), model=SPEC), name="train"))
        self.value = 0.5

    def train_step(self, step: int) -> tuple[dict[str, float], StepStats]:
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.value = state_dict["value"]


@dataclass(frozen=True)
class _Good:
    """A checkpoint as it was saved: its files, and what is to come of them."""

    saved: Saved
    files: dict[str, bytes]
    hashes: tuple[str, str]  # of the weights, and of them and all that the optimizer has


def _resolved(config: JobConfig) -> Job:
    model = RoleModel(role="actor", key="actor.model", spec=SPEC)
    actor = context("actor", ParallelPlan(), model=SPEC)
    return placed(config, actor, models={"actor": model})


class Kind:
    limit_s = 10
    imports = ("safetensors.torch", "torch.distributed.checkpoint")

    def __init__(self, folder: Path) -> None:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        torch.set_num_threads(1)
        self.folder, self.run, self.mark = folder, folder / "run", folder / "mark"
        self.trainer = _Trainer(_resolved(_job(self.run)), init_distributed("cpu", 60.0))
        self.model = self.trainer.models["actor"]
        made = [self._made(job, step) for job in "ab" for step in (FIRST, LAST)]
        self.own, self.foreign = made[:2], [made[0], *made[2:]]
        gc.collect()
        gc.freeze()  # Megatron collects at every load, and need not look at all of this

    def case(self, draw: random.Random) -> Case:
        """Damage the later of two checkpoints, and use it."""
        shutil.rmtree(self.run, ignore_errors=True)
        self.mark.unlink(missing_ok=True)
        for good in self.own:
            self.path = self.run / "checkpoints" / good.saved.path.name
            self.path.mkdir(parents=True)
            for name, data in good.files.items():
                (self.path / name).write_bytes(data)
        do = draw.choice(_DAMAGES)
        what = do(self, draw)
        # Behind checksums that agree all but the tensors may be other than it was.
        agrees, sums = do in _BEHIND and draw.random() < 0.8, ""
        if agrees:
            sums = "checksums agree, "
            if not what.startswith("checksums.json"):
                reseal(self.path)
        use = draw.choice(_USES)
        return Case(
            f"{what}; {sums}{use.__name__[1:]}",
            lambda: use(self),
            lambda result: self._taken(use, do, *result) or self._wrong(*result, agrees=agrees),
            self.mark,
        )

    def _made(self, job: str, step: int) -> _Good:
        optimizer_step("actor", self.model)
        folder = self.folder / job
        origin = {"job_id": job * 32, "starts": {}}
        about = job_metadata(_job(self.run), self.trainer, torch.device("cpu"), origin)
        save_checkpoint(folder, step, about, self.trainer.models)
        path = folder / f"step_{step:08d}"
        files = {file.name: file.read_bytes() for file in path.iterdir()}
        return _Good(open_checkpoint(path), files, (self.weights(), digest(self.model)))

    def weights(self) -> str:
        found = hashlib.sha256()
        for value in self.model.context.chunks[0].parameters():
            found.update(value.detach().numpy().tobytes())
        return found.hexdigest()

    def spoil(self) -> None:
        """Let nothing be what a load could leave as it is."""
        parts = self.model.optimizer.megatron.chained_optimizers  # type: ignore[union-attr]
        states = [own for part in parts for own in part.optimizer.state.values()]
        with torch.no_grad():
            for value in (value for own in states for value in own.values()):
                value.fill_(-1.0)
            for value in self.model.context.chunks[0].parameters():
                value.fill_(-1.0)

    def _taken(self, use: Any, do: Any, saved: Saved, found: str) -> str | None:
        """Problem if a run goes on from a damaged checkpoint, whatever it read of it."""
        is_run = use is _resumes and do not in _BEHIND
        return "the damaged one was taken" if is_run and saved.step == LAST else None

    def _wrong(self, saved: Saved, found: str, *, agrees: bool) -> str | None:
        """Problem with the contents that were read; ``found``: a hash of them all."""
        for good in self.own:
            is_same = replace(good.saved, path=saved.path) == saved
            if is_same and found in good.hashes:
                return None
            # The optimizer's numbers that are in no shards are then what the file says.
            if agrees and self.weights() == good.hashes[0]:
                return None
        return f"step {saved.step} was read, with other values than were saved"


def _rewrite(
    kind: Kind, draw: random.Random, change: Callable[[random.Random, bytes], tuple[str, bytes]]
) -> str:
    file = kind.path / draw.choice(sorted(kind.own[1].files))
    what, data = change(draw, file.read_bytes())
    file.write_bytes(data)
    return f"{file.name}: {what}"


def _lose(kind: Kind, draw: random.Random) -> str:
    file = kind.path / draw.choice(sorted(kind.own[1].files))
    file.unlink()
    instead = draw.choice(("gone", "gone", "gone", "a directory", "a loop of links"))
    if instead == "a directory":
        file.mkdir()
    elif instead == "a loop of links":  # as of a disk that fails: not to be called damage
        file.symlink_to(file.name)
    return f"{file.name} is {instead}"


def _exchange(kind: Kind, draw: random.Random) -> str:
    """Put in files of another step or another job; all of them would be another checkpoint."""
    other = draw.choice(kind.foreign)
    mine = kind.own[1].files
    names = [name for name in sorted(mine) if other.files[name] != mine[name]]
    chosen = draw.sample(names, draw.randrange(1, len(names)))
    for name in chosen:
        (kind.path / name).write_bytes(other.files[name])
    return f"{', '.join(chosen)} of {other.saved.path.parent.name}/{other.saved.path.name}"


def _other_value(kind: Kind, draw: random.Random) -> str:
    file = kind.path / draw.choice(("job.json", "job.json", "metadata.json", "checksums.json"))
    tree = json.loads(file.read_bytes())
    places = [place for place in _places(tree) if "model" not in place[1:4]]  # of ``hf_config``
    place = draw.choice(places)
    if file.name == "job.json" and draw.random() < 0.5:
        place = place[: draw.choice((1, 2))]
    value = draw.choice(NASTY)
    holder = tree
    for key in place[:-1]:
        holder = holder[key]
    if draw.random() < 0.15:
        del holder[place[-1]]
        value = "nothing"
    else:
        holder[place[-1]] = value
    text = draw.choice((json.dumps(tree), json.dumps(tree), "[" * 50_000, json.dumps(value)))
    if file.name == "checksums.json":
        with suppress(ValueError):
            text = sealed({name: own for name, own in tree.items() if name != "xxh3_64"})
    file.write_text(text)
    return f"{file.name}: {place} is {value!r:.60}"


def _places(tree: Any, above: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Paths of the values in the tree and all trees in it."""
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield (*above, key)
            yield from _places(value, (*above, key))


class _Code:
    """Unpickled, it writes the mark."""

    def __init__(self, draw: random.Random, mark: Path) -> None:
        text = f"open({str(mark)!r}, 'w').close()"
        self.made = draw.choice(
            (
                (exec, (text,)),
                (eval, (text,)),
                (os.system, (f"touch {mark}",)),
                (os.open, (str(mark), os.O_CREAT)),
                (Path.touch, (mark,)),
                (subprocess.call, (["touch", str(mark)],)),
                (torch.save, (1, str(mark))),
            )
        )

    def __reduce__(self) -> Any:
        return self.made


def _hide_code(kind: Kind, draw: random.Random) -> str:
    """Put code into one of the places that hold pickles."""
    code, place = _Code(draw, kind.mark), draw.choice((".metadata", "common.pt", "__0_0.distcp"))
    file = kind.path / place
    if place == ".metadata":
        metadata = pickle.loads(file.read_bytes())
        where = draw.choice(("planner_data", "version", "storage_data", "state_dict_metadata"))
        setattr(metadata, where, draw.choice((code, {"a": code}, [code])))
        file.write_bytes(pickle.dumps(draw.choice((metadata, code)), protocol=draw.choice((2, 4))))
        return f"code in {place} ({where})"
    stream = io.BytesIO()
    if draw.random() < 0.5:
        torch.save(draw.choice(([code], {"actor": code}, code)), stream)
    else:
        pickle.dump(code, stream)  # what torch took for a file before there were archives
    if place == "common.pt":
        file.write_bytes(stream.getvalue())
        return f"code in {place}"
    # Where a piece begins, and its end as the archive's end must be.
    pieces = unsealed((kind.path / "checksums.json").read_bytes())["files"][place]["ends"]
    number = draw.choice((0, draw.randrange(len(pieces))))
    start, end = (0, *pieces)[number], pieces[number]
    data, crafted = bytearray(file.read_bytes()), stream.getvalue()
    if len(crafted) > end - start:
        crafted = pickle.dumps(code)
    at_end = draw.random() < 0.5
    first = end - len(crafted) if at_end else start
    data[start:end] = bytes(end - start)
    data[first : first + len(crafted)] = crafted
    file.write_bytes(data[: len(kind.own[1].files[place])])
    return f"code in {place}, piece {number}"


def _other_pickle(kind: Kind, draw: random.Random) -> str:
    """Put other values, that are no code, into ``.metadata``, ``common.pt`` or a piece of them."""
    if draw.random() < 0.5:
        file = kind.path / ".metadata"
        metadata = pickle.loads(file.read_bytes())
        table = draw.choice((metadata.storage_data, metadata.state_dict_metadata))
        key = draw.choice(list(table))
        attributes = [name for name in vars(table[key]) if name != "properties"] or ["nothing"]
        name = draw.choice(attributes)
        value = draw.choice((*NASTY, torch.Size([3]), key))
        object.__setattr__(table[key], name, value)
        if draw.random() < 0.2:
            table[draw.choice((None, 3, "a", torch.Size([1])))] = table.pop(key)
        file.write_bytes(pickle.dumps(metadata))
        return f".metadata: {name} of {key!r:.50} is {value!r:.50}"
    file = kind.path / "common.pt"
    tree = torch.load(file, weights_only=True)
    place = draw.choice(list(_places(tree)))
    holder, value = tree, draw.choice((*NASTY, torch.zeros(2)))
    for key in place[:-1]:
        holder = holder[key]
    if place[-1] == "param_groups" and draw.random() < 0.8:
        holder, place = draw.choice(holder["param_groups"]), (*place, "lr")
        place = (*place[:-1], draw.choice(list(holder)))
    holder[place[-1]] = value
    torch.save(draw.choice((tree, tree, tree, value)), file)
    return f"common.pt: {place} is {value!r:.60}"


def _resumes(kind: Kind) -> tuple[Saved, str]:
    config = _job(kind.run)
    kind.spoil()
    step, _ = resume(_resolved(config), kind.trainer, {}, to_resume(config))
    path = kind.run / "checkpoints" / f"step_{step:08d}"
    return open_checkpoint(path), digest(kind.model)


def _converts(kind: Kind) -> tuple[Saved, str]:
    saved = find_checkpoint(kind.run)
    role = saved.main_role
    about = saved.metadata(role)
    assert from_hf_config(about["model"], "") and isinstance(saved.tokenizer, dict)
    kind.spoil()
    load_checkpoint(saved, {role: Trained(kind.model.context, None)})
    return saved, kind.weights()


def _generates(kind: Kind) -> tuple[Saved, str]:
    named = generate.open_model(kind.run)
    job = generate.job_of(named, [])
    _fill(kind, RoleModel(role="actor", key="--model", spec=named.spec, files=named), job)
    return find_checkpoint(kind.path), kind.weights()


def _fill(kind: Kind, model: RoleModel, job: JobConfig) -> None:
    weights = role_weights(model, job)
    weights.check()
    kind.spoil()
    weights.fill(kind.model.context.chunks[0])


def _starts_from_it(kind: Kind) -> tuple[Saved, str]:
    job = load_job("stage: dpo", [f"actor.model.path={kind.run}"])
    resolution = Resolution(job)
    model = resolution.model("actor")
    foreign_tokenizers(resolution.tokenizer().path, [model])
    _fill(kind, model, job)
    return find_checkpoint(kind.path), kind.weights()


def _job(output_dir: Path) -> JobConfig:
    return JobConfig(
        output_dir=str(output_dir),
        actor=RoleConfig(model=ModelConfig(config=to_hf_config(SPEC))),
        optimizer=OptimizerConfig(lr=RATE),
    )


_BEHIND = (_other_value, _hide_code, _other_pickle)
_flip, _damage = (partial(_rewrite, change=change) for change in (flipped, damaged_bytes))
_DAMAGES = (_flip, _flip, _damage, _lose, _exchange, *_BEHIND)
_USES = (_resumes, _resumes, _resumes, _converts, _generates, _starts_from_it)
