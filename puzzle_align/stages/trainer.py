"""What a stage gives the training loop."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from puzzle_align.layout.job_plan import JobPlan
from puzzle_align.runtime.checkpoint.models import Trained
from puzzle_align.stages.divergence import Update
from puzzle_align.telemetry import Sample, StepStats


class Trainer(Protocol):
    """One stage's, on every rank."""

    plan: JobPlan
    num_steps: int
    num_skipped: int  # rank 0's is kept
    updates: Sequence[Update] = ()  # of the last step, in order; empty on ranks that know of none
    data_fingerprint: str
    models: Mapping[str, Trained]  # by role, those of which this rank has a part; maybe none
    # Whether the phases that a step reports end when all ranks and their devices are done: their
    # seconds are then the slowest one's, and no phase's work is counted to the next. (A step that
    # reports none ends so anyway: with metrics that all who train put together.)
    waits_between_phases: bool = False

    def state_dict(self) -> dict[str, Any]:
        """Small JSON values to save beside the models and counters; rank 0's are kept."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over, on every rank, what ``state_dict`` gave when the checkpoint was saved."""

    def train_step(self, step: int) -> tuple[dict[str, float], StepStats]:
        """Step ``step``, counted from 0: the metrics, on rank 0, and the work done."""
        ...

    def samples(self) -> Sequence[Sample]:
        """Some of the last step's responses, on rank 0; none of a stage that samples none."""
        return ()

    def evaluate(self) -> dict[str, float] | None:
        """Metrics of the held-out data; None without any, and on ranks that know none."""
        return None
