"""Telemetry of one run: records to every sink, progress on the screen, a closing summary."""

import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from puzzle_align.config.sections.output import TelemetryConfig
from puzzle_align.telemetry import text
from puzzle_align.telemetry.progress import open_progress
from puzzle_align.telemetry.sinks import (
    EVAL_PREFIX,
    JsonlSink,
    Record,
    Sample,
    Sink,
    TensorBoardSink,
    WandbSink,
    check_wandb,
    samples_table,
)
from puzzle_align.telemetry.throughput import StepStats, peak_flops, peak_memory, rates

# Metrics in the summary, with first and last value: metric, label, format.
TRACKED: tuple[text.Formatted, ...] = (
    ("loss", "loss", ".4f"),
    ("objective/scores", "scores", ".4f"),
    ("objective/kl", "kl", ".4f"),
    (f"{EVAL_PREFIX}rewards/accuracies", "eval accuracy", ".3f"),  # of a policy
    (f"{EVAL_PREFIX}accuracy", "eval accuracy", ".3f"),  # of a reward model
)


class Telemetry:
    """Logs the metrics of every step; call it alike on all ranks, but only rank 0 writes and shows.

    After a resume, the summary's first values are those of the records written before it.
    """

    def __init__(
        self,
        config: TelemetryConfig,
        *,
        output_dir: Path,
        rank: int,
        world_size: int,
        device: torch.device,
        num_steps: int,
        resumed_step: int | None,
        settings: dict[str, Any],
    ) -> None:
        """Open the sinks and the display on rank 0.

        Args:
            resumed_step: of the checkpoint to resume from; None for a fresh run, which empties
                ``output_dir/metrics.jsonl`` and removes ``samples.jsonl``.
            settings: the job's config, for W&B.

        Raises:
            ValueError: on every rank, if W&B is configured and not installed.
        """
        check_wandb(config.wandb_project)
        self._num_steps, self._log_every, self._device = num_steps, config.log_every, device
        self._stats = StepStats()  # of all steps together
        self._step = 0
        self._tracked: dict[str, list[float]] = {}  # the first and the last value
        self._sinks: list[Sink] = []
        if rank == 0:
            jsonl = JsonlSink(output_dir / "metrics.jsonl", resumed_step)
            self._sinks.append(jsonl)
            for record in jsonl.resumed:
                self._remember(record["step"], record)
            if config.tensorboard:
                self._sinks.append(TensorBoardSink(output_dir / "tensorboard", resumed_step))
            if (project := config.wandb_project) is not None:
                self._sinks.append(WandbSink(project, output_dir, resumed_step, settings))
        self._started = time.monotonic()
        self._progress = open_progress(rank, config.progress, num_steps, resumed_step or 0)
        device_name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
        of_device = peak_flops(device_name, config.peak_tflops)
        self._peak_flops = None if of_device is None else of_device * world_size

    def log(self, step: int, metrics: Mapping[str, float], stats: StepStats) -> None:
        """Log the metrics of optimizer step ``step`` (1-based), and its work.

        They are written if ``step`` is the first, the last, or a multiple of ``log_every``. Rates
        and this process's ``peak_memory`` are added, in place of a metric of that name.
        """
        self._stats += stats
        record = {**metrics, **rates(stats, self._peak_flops)}
        record["peak_memory"] = peak_memory(self._device)
        self._remember(step, record)
        logged = step in (1, self._num_steps) or step % self._log_every == 0
        if logged:
            self._write(step, record)
        self._progress.step(step, record, logged)

    def eval(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log the metrics of an evaluation after ``step`` steps; adds the prefix ``eval_``."""
        record = {f"{EVAL_PREFIX}{name}": value for name, value in metrics.items()}
        self._remember(step, record)
        self._write(step, record)
        self._progress.say(f"eval at step {step}: {text.fields(record, prefix=EVAL_PREFIX)}")

    def log_samples(self, step: int, samples: Sequence[Sample]) -> None:
        """Log some responses of a step, for people to read."""
        for sink in self._sinks:
            sink.write_samples(step, samples)
        self._progress.say(samples_table(step, samples))

    def close(self, further: Iterable[tuple[str, str]] = ()) -> None:
        """Close every sink and print the closing summary, with ``further`` lines."""
        self._progress.close()
        for sink in self._sinks:
            sink.close()
        self._progress.say(text.table((*self._summary_lines(), *further), "summary"))

    def _write(self, step: int, record: Record) -> None:
        for sink in self._sinks:
            sink.write(step, record)

    def _remember(self, step: int, record: Mapping[str, Any]) -> None:
        self._step = step
        for name, _, _ in TRACKED:
            if record.get(name) is not None:
                self._tracked.setdefault(name, [])[1:] = [record[name]]

    def _summary_lines(self) -> list[tuple[str, str]]:
        lines = [
            ("steps", f"{self._step} of {self._num_steps}"),
            ("time", text.duration(time.monotonic() - self._started)),
        ]
        for name, label, form in TRACKED:
            if name in self._tracked:
                first, last = self._tracked[name][0], self._tracked[name][-1]
                lines.append((label, f"{first:{form}} -> {last:{form}}"))
        measured = rates(self._stats, self._peak_flops)
        shown = (
            ("pairs_per_second", "pairs/s", text.quantity),
            ("responses_per_second", "responses/s", text.quantity),
            ("tokens_per_second", "tokens/s", text.quantity),
            ("generate/tokens_per_second", "tokens/s, generate", text.quantity),
            ("fill", "fill", _percent),
            ("mfu", "MFU", _percent),
        )
        lines += [(label, form(measured[name])) for name, label, form in shown if name in measured]
        if self._stats.phases:
            lines.append(("phases", _shares(self._stats.phases)))
        lines.append(("peak memory", text.num_bytes(peak_memory(self._device))))
        return lines


def _shares(seconds: Mapping[str, float]) -> str:
    """``generate 41.0%, score 12.0%, learn 47.0%``."""
    total = sum(seconds.values()) or 1.0
    return ", ".join(f"{name} {_percent(spent / total)}" for name, spent in seconds.items())


def _percent(share: float) -> str:
    return f"{100 * share:.1f}%"
