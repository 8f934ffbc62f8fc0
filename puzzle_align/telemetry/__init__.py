"""Reports of a run: metrics, throughput, JSONL, TensorBoard, W&B, progress, closing summary.

TensorBoard and Weights & Biases are imported only when a run opens them.
"""

from puzzle_align.telemetry.sinks import Sample
from puzzle_align.telemetry.telemetry import Telemetry
from puzzle_align.telemetry.throughput import StepStats
from puzzle_align.telemetry.waits import WaitCounter

__all__ = ["Sample", "StepStats", "Telemetry", "WaitCounter"]
