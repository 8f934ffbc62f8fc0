"""Sinks of records: ``metrics.jsonl``, TensorBoard event files, Weights & Biases.

Samples of responses go to ``samples.jsonl`` beside ``metrics.jsonl`` (one per line: step, prompt,
response, score, columns logged by reward functions), to TensorBoard texts and to a W&B table.
``resumes.jsonl`` has a line for each time that the run was resumed: the step, and when (a time of
``time.time``).

Invariants of ``metrics.jsonl`` and ``samples.jsonl`` (the tests assert them):
- one JSON object per line, flushed; floats are written by ``repr``, so equal bits are equal text
  and two runs' losses can be compared bitwise; non-finite values are null, as JSON has no NaN;
- after a resume they hold no later steps than the resumed one and no torn line, like the files of a
  run that was never interrupted.

Evaluation metrics have the prefix ``eval_`` (``eval_loss``, ``eval_rewards/chosen``). TensorBoard
and W&B group by slash, so the tags there are ``train/loss`` and ``eval/loss``.
"""

import importlib
import importlib.util
import json
import math
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from puzzle_align.files.messages import shown, writing
from puzzle_align.telemetry import text

Record = dict[str, float]
EVAL_PREFIX = "eval_"
_PROMPT_WIDTH, _RESPONSE_WIDTH = 32, 64  # characters shown


@dataclass(frozen=True)
class Sample:
    """One response."""

    prompt: str
    response: str
    score: float
    extra: Mapping[str, Any] = field(default_factory=dict)  # JSON logged by reward functions
    prompt_end: str = ""  # what a line shows the end of, such as the last message; '': the prompt

    def columns(self) -> dict[str, Any]:
        """All columns by name; extra columns with a built-in column's name are left out."""
        columns = {"prompt": self.prompt, "response": self.response, "score": self.score}
        taken = {"step", *columns}
        return columns | {name: value for name, value in self.extra.items() if name not in taken}


class Sink(Protocol):
    """Writes a step's metrics, and samples of its responses."""

    def write(self, step: int, metrics: Record) -> None:
        """Write metrics so that a kill right after this call loses nothing."""

    def write_samples(self, step: int, samples: Sequence[Sample]) -> None:
        """Write samples in the same way."""

    def close(self) -> None:
        """Flush and release."""


def read_records(path: Path, last_step: int) -> tuple[list[dict[str, Any]], int]:
    """Records of ``path`` up to ``last_step``, and their length in the file in bytes.

    A last line cut off by a kill is left out. ValueError names any other invalid line.
    """
    records: list[dict[str, Any]] = []
    length = 0
    lines = path.read_bytes().splitlines(keepends=True)
    for number, line in enumerate(lines, start=1):
        if number == len(lines) and not line.endswith(b"\n"):
            break
        record = _parse_record(path, number, line)
        if record["step"] > last_step:
            break
        records.append(record)
        length += len(line)
    return records, length


def _parse_record(path: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        record = None
    if not isinstance(record, dict) or not isinstance(record.get("step"), int):
        raise ValueError(
            f"{path}:{number}: not a record with a step: {line[:40]!r}; "
            "remove the line, or move the file away"
        )
    return record


class JsonlSink:
    """Appends records to ``path``, and samples to ``samples.jsonl`` beside it.

    ``resumed_step`` None starts empty; otherwise later steps are cut off in one truncation, and
    ``resumed`` holds the remaining records. ``samples.jsonl`` exists only if there are samples.
    """

    def __init__(self, path: Path, resumed_step: int | None) -> None:
        self.resumed: list[dict[str, Any]] = []
        length = 0
        if resumed_step is not None and path.exists():
            self.resumed, length = read_records(path, resumed_step)
        self._path, self._samples = path, path.with_name("samples.jsonl")
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("a") as file:
                file.truncate(length)
        with writing(self._samples):
            if resumed_step is None:
                self._samples.unlink(missing_ok=True)
            elif self._samples.exists():
                os.truncate(self._samples, read_records(self._samples, resumed_step)[1])
        resumes = path.with_name("resumes.jsonl")
        with writing(resumes):
            if resumed_step is None:
                resumes.unlink(missing_ok=True)
            elif resumes.exists():  # cut off a line that a kill or a full disk has torn
                os.truncate(resumes, resumes.read_bytes().rfind(b"\n") + 1)
        if resumed_step is not None:
            _append(resumes, [{"step": resumed_step, "time": time.time()}])

    def write(self, step: int, metrics: Record) -> None:
        """Append a line."""
        finite = {name: _json_number(value) for name, value in metrics.items()}
        _append(self._path, [{"step": step} | finite | {"step": step}])  # a reward may log a step

    def write_samples(self, step: int, samples: Sequence[Sample]) -> None:
        """Append a line per sample."""
        columns = ({**one.columns(), "score": _json_number(one.score)} for one in samples)
        _append(self._samples, [{"step": step, **values} for values in columns])

    def close(self) -> None:
        """Nothing is open."""


def _append(path: Path, records: Sequence[dict[str, Any]]) -> None:
    """Append a line per record, reopening the file: writes to a deleted one would be lost."""
    with writing(path), path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(record, allow_nan=False) + "\n" for record in records)


def _json_number(value: float) -> float | None:
    return value if math.isfinite(value) else None


class TensorBoardSink:
    """Writes scalars under ``directory``; TensorBoard hides events after the resumed step."""

    def __init__(self, directory: Path, resumed_step: int | None) -> None:
        tensorboard = importlib.import_module("torch.utils.tensorboard")
        # purge_step hides earlier runs' events from that step on; for a fresh run, all of them.
        purge_step = 0 if resumed_step is None else resumed_step + 1
        self._directory = directory
        threading.excepthook = partial(_pass_over_writers, threading.excepthook)
        with writing(directory):
            self._writer = tensorboard.SummaryWriter(str(directory), purge_step=purge_step)

    def write(self, step: int, metrics: Record) -> None:
        """Write and flush a scalar per metric."""
        with writing(self._directory):
            for tag, value in _tagged(metrics).items():
                self._writer.add_scalar(tag, value, step)
            self._writer.flush()

    def write_samples(self, step: int, samples: Sequence[Sample]) -> None:
        """Write and flush the samples as one text."""
        with writing(self._directory):
            self._writer.add_text("train/samples", samples_markdown(samples), step)
            self._writer.flush()

    def close(self) -> None:
        """Close the event file."""
        with writing(self._directory):
            self._writer.close()


def _pass_over_writers(
    otherwise: Callable[[threading.ExceptHookArgs], object], failed: threading.ExceptHookArgs
) -> None:
    """Hide tracebacks of TensorBoard's thread, whose error the next write raises."""
    if not type(failed.thread).__module__.startswith("tensorboard."):
        otherwise(failed)


class WandbSink:
    """Logs to a W&B project; a resumed job continues its run, by the id saved in ``directory``."""

    def __init__(
        self, project: str, directory: Path, resumed_step: int | None, settings: dict[str, Any]
    ) -> None:
        wandb = importlib.import_module("wandb")
        id_file = directory / "wandb_run_id"
        resumes = resumed_step is not None and id_file.exists()
        try:
            self._run = wandb.init(
                project=project,
                name=directory.name,
                dir=str(directory),
                config=settings,
                id=id_file.read_text().strip() if resumes else None,
                resume="allow" if resumes else None,
            )
        except Exception as error:  # of its own classes: no key, no network, no such project
            raise ValueError(
                f"telemetry.wandb_project={shown(project)}: W&B does not start "
                f"({shown(str(error))}); run wandb login, set WANDB_MODE=offline, or set it to null"
            ) from error
        with writing(id_file):
            id_file.write_text(self._run.id)
        # Steps redone after a resume are logged twice: W&B's counter must not go back, "step" may.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def write(self, step: int, metrics: Record) -> None:
        """Log the metrics under the job's step."""
        self._run.log({"step": step, **_tagged(metrics)})

    def write_samples(self, step: int, samples: Sequence[Sample]) -> None:
        """Log the samples as a table."""
        every = [sample.columns() for sample in samples]
        columns = [*dict.fromkeys(name for values in every for name in values)]
        rows = [[values.get(name) for name in columns] for values in every]
        wandb = importlib.import_module("wandb")
        table = wandb.Table(columns=columns, data=rows, allow_mixed_types=True)
        self._run.log({"step": step, "train/samples": table})

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()


def check_wandb(project: str | None) -> None:
    """Raise a ValueError if a W&B project is configured and ``wandb`` is not installed."""
    if project is not None and importlib.util.find_spec("wandb") is None:
        raise ValueError(
            f"telemetry.wandb_project={shown(project)}: wandb is not installed; "
            "pip install 'puzzle-align[wandb]', or set telemetry.wandb_project to null"
        )


def _tagged(metrics: Record) -> Record:
    """Rename ``loss`` to ``train/loss`` and ``eval_loss`` to ``eval/loss``."""
    return {
        f"eval/{name.removeprefix(EVAL_PREFIX)}"
        if name.startswith(EVAL_PREFIX)
        else f"train/{name}": value
        for name, value in metrics.items()
    }


def samples_table(step: int, samples: Sequence[Sample]) -> str:
    """A table of scores, prompts' ends and responses' beginnings, both quoted."""
    lines = []
    for sample in samples:
        prompt, response = repr(sample.prompt_end or sample.prompt), repr(sample.response)
        texts = f"{_end(prompt):<{_PROMPT_WIDTH}}  {_beginning(response)}"
        lines.append((f"{sample.score:.4f}", texts))
    return text.table(lines, f"samples at step {step}: score, prompt, response")


def samples_markdown(samples: Sequence[Sample]) -> str:
    """Markdown of whole samples, with texts as code blocks."""
    shown = []
    for sample in samples:
        texts = {name: value for name, value in sample.columns().items() if name != "score"}
        blocks = (f"{name}:\n\n{_block(str(value))}" for name, value in texts.items())
        shown.append(f"**score {sample.score:.4f}**, " + "\n\n".join(blocks))
    return "\n\n".join(shown).encode("utf-8", "backslashreplace").decode()  # halves of pairs


def _beginning(quoted: str) -> str:
    if len(quoted) <= _RESPONSE_WIDTH:
        return quoted
    return f"{quoted[: _RESPONSE_WIDTH - 3]}..."


def _end(quoted: str) -> str:
    return quoted if len(quoted) <= _PROMPT_WIDTH else f"...{quoted[3 - _PROMPT_WIDTH :]}"


def _block(content: str) -> str:
    """Indent the text as a code block, so that nothing in it is markup."""
    return "\n".join(f"    {line}" for line in content.splitlines()) or "    "
