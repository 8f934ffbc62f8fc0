"""Examples with labels, as reading data that has them gives them."""

from dataclasses import replace

import numpy as np

from puzzle_align.data.dataset import ExampleDataset, labelled_fingerprint


def with_labels(dataset: ExampleDataset, labels: np.ndarray) -> ExampleDataset:
    """The same examples with labels (float64 [n])."""
    fingerprint = labelled_fingerprint(dataset.fingerprint, labels)
    return replace(dataset, labels=labels, fingerprint=fingerprint)
