"""Interface between a stage and the training loop."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from puzzle_align.config.resolve import Job
from puzzle_align.layout.job_plan import JobPlan
from puzzle_align.runtime.checkpoint.models import Trained
from puzzle_align.runtime.groups.world import World
from puzzle_align.stages.divergence import Update
from puzzle_align.stages.tracing import Tracer
from puzzle_align.telemetry import Sample, StepStats


class Trainer(Protocol):
    """Trainer of one stage, on every rank."""

    job: Job
    plan: JobPlan
    world: World
    num_steps: int
    num_skipped: int  # rank 0's is saved
    updates: Sequence[Update] = ()  # of the last step, in order; empty on ranks that see none
    data_fingerprint: str
    stop_token_ids: Sequence[int] = ()  # that end a sampled response
    data: Any = None  # as the stage opens them, for its ``outlook.work``
    models: Mapping[str, Trained]  # by role; those with a part on this rank
    # Whether ranks and devices synchronize at the end of each reported phase: its seconds are then
    # the slowest rank's, and none of its work counts for the next phase. (A step without phases
    # always ends so, since its metrics are reduced over the ranks that train.)
    waits_between_phases: bool = False
    # Seconds of a phase that runs once, before the first step; 0: it did not run.
    seconds_before: float = 0.0
    tracer: Tracer | None = None

    def state_dict(self) -> dict[str, Any]:
        """Small JSON values to save beside the models and counters; rank 0's are saved."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore, on every rank, the saved result of ``state_dict``."""

    def train_step(self, step: int) -> tuple[dict[str, float], StepStats]:
        """Train step ``step`` (from 0); return the metrics, on rank 0, and the work done."""
        ...

    def samples(self) -> Sequence[Sample]:
        """Some of the last step's responses, on rank 0; empty for stages without sampling."""
        return ()

    def evaluate(self) -> dict[str, float] | None:
        """Metrics of the held-out data; None without any, and on ranks that compute none."""
        return None
