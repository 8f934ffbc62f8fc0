"""Tokenized examples in columns: a flat token array, with starts and lengths of its parts.

Shapes: n examples with K >= 1 responses each.
"""

import hashlib
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import xxhash

TokenizedExample = tuple[Sequence[int], Sequence[Sequence[int]]]  # prompt, K responses


@dataclass(frozen=True)
class ExampleDataset:
    """Prompts with K responses each, as token ids. Arrays may be memory-mapped."""

    tokens: np.ndarray  # int32 [total]
    prompt_starts: np.ndarray  # int64 [n], index into tokens
    prompt_lengths: np.ndarray  # int32 [n]
    response_starts: np.ndarray  # int64 [n, K]
    response_lengths: np.ndarray  # int32 [n, K]
    pad_id: int
    fingerprint: str  # hash of the content, the same on every machine
    # Human labels, float64 [n]: a pair's margin (by how much the chosen response is better), or 1
    # for a desirable single response and 0 for an undesirable one. None: all 0.
    labels: np.ndarray | None = None
    # Places of ranked responses, int32 [n, K]: 0 for the best, rising, equal for equally good ones,
    # -1 where an example has fewer responses (of length 0). None: of a pair the first is better.
    levels: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.prompt_starts)

    @property
    def num_responses(self) -> int:
        """K."""
        return self.response_lengths.shape[1]

    def prompt(self, index: int) -> np.ndarray:
        """Prompt tokens of example ``index``, int32."""
        start = self.prompt_starts[index]
        return self.tokens[start : start + self.prompt_lengths[index]]

    def response(self, index: int, branch: int) -> np.ndarray:
        """Tokens of response ``branch`` (in a pair: 0 chosen, 1 rejected), int32."""
        start = self.response_starts[index, branch]
        return self.tokens[start : start + self.response_lengths[index, branch]]

    def num_predicted(self, indices: np.ndarray) -> np.ndarray:
        """Number of predicted tokens of each response of ``indices``, int64 [m, K]."""
        without_prompt = (self.prompt_lengths[indices] == 0)[:, None]
        lengths = self.response_lengths[indices].astype(np.int64)
        return np.maximum(lengths - without_prompt, 0)

    def labels_of(self, indices: np.ndarray) -> np.ndarray:
        """Labels of examples (int [m]), float64 [m]; zeros if the data has none."""
        return np.zeros(len(indices)) if self.labels is None else self.labels[indices]

    def comparisons(self, indices: np.ndarray) -> np.ndarray:
        """Comparisons of the examples ``indices`` (int [m]), in order: int64 [P, 3].

        Columns: place of the example in ``indices``, its better response, its worse one.
        """
        if self.levels is None:
            return np.arange(len(indices))[:, None] * [1, 0, 0] + [0, 0, 1]
        levels = self.levels[indices]
        is_better = (levels[:, :, None] < levels[:, None, :]) & (levels[:, :, None] >= 0)
        return np.argwhere(is_better)

    def num_comparisons(self, indices: np.ndarray) -> int:
        """Number of comparisons of examples; of pairs, and single responses, their number."""
        return len(indices) if self.levels is None else len(self.comparisons(indices))

    def subset(self, indices: np.ndarray) -> "ExampleDataset":
        """The examples ``indices`` (int [m]), in this order; shares the token array."""
        indices = np.asarray(indices, dtype=np.int64)
        digest = hashlib.sha256(self.fingerprint.encode() + indices.tobytes())
        return ExampleDataset(
            self.tokens,
            self.prompt_starts[indices],
            self.prompt_lengths[indices],
            self.response_starts[indices],
            self.response_lengths[indices],
            self.pad_id,
            digest.hexdigest(),
            None if self.labels is None else self.labels[indices],
            None if self.levels is None else self.levels[indices],
        )

    def mismatched(
        self, indices: np.ndarray, partners: np.ndarray, longest: int
    ) -> "ExampleDataset":
        """The prompts of ``indices`` (int [m]), each with the response of its partner (int [m]).

        KTO estimates its KL term on these examples (K = 1). A response is cut so that it has
        ``longest`` tokens with its prompt; all prompts have fewer.
        """
        prompts, others = self.subset(indices), self.subset(partners)
        room = (longest - prompts.prompt_lengths)[:, None]
        return replace(
            prompts,
            response_starts=others.response_starts,
            response_lengths=np.minimum(others.response_lengths, room).astype(np.int32),
            labels=None,
        )


def from_examples(examples: Iterable[TokenizedExample], pad_id: int) -> ExampleDataset:
    """Collect tokenized examples, all with the same number of responses."""
    tokens, lengths, num_parts = array("i"), array("i"), 3
    for prompt, responses in examples:
        num_parts = 1 + len(responses)
        lengths.append(len(prompt))
        tokens.extend(prompt)
        for response in responses:
            lengths.append(len(response))
            tokens.extend(response)
    parts = np.array(lengths, dtype=np.int32).reshape(-1, num_parts)
    values = np.array(tokens, dtype=np.int32)
    return contiguous(values, parts, pad_id, content_fingerprint(parts, values, pad_id))


def contiguous(
    tokens: np.ndarray,
    part_lengths: np.ndarray,
    pad_id: int,
    fingerprint: str,
    labels: np.ndarray | None = None,
    levels: np.ndarray | None = None,
) -> ExampleDataset:
    """Make a dataset whose prompts and responses lie back to back in ``tokens`` (int32).

    ``part_lengths`` (int32 [n, 1 + K]) are the lengths of each prompt and its responses.
    """
    starts = np.cumsum(part_lengths, dtype=np.int64).reshape(part_lengths.shape)
    starts -= part_lengths  # from ends to starts
    return ExampleDataset(
        tokens,
        starts[:, 0],
        part_lengths[:, 0],
        starts[:, 1:],
        part_lengths[:, 1:],
        pad_id,
        fingerprint,
        labels,
        levels,
    )


def content_fingerprint(
    part_lengths: np.ndarray,
    tokens: np.ndarray,
    pad_id: int,
    labels: np.ndarray | None = None,
    levels: np.ndarray | None = None,
) -> str:
    """Hash the arrays of ``contiguous``; with others, the hash without them and the others."""
    digest = hashlib.sha256(repr((part_lengths.shape, pad_id)).encode())
    digest.update(part_lengths.data)
    digest.update(tokens.data)
    for others in (labels, levels):
        if others is not None:
            digest = hashlib.sha256(digest.hexdigest().encode())
            digest.update(others.data)
    return digest.hexdigest()


def split(
    dataset: ExampleDataset, held_out: float, seed: int
) -> tuple[ExampleDataset, ExampleDataset]:
    """Split into ``(train, held-out)`` by a random share ``held_out``, decided by the seed.

    Both keep the dataset's order; at least one example is held out. Single responses to the same
    prompt stay together, so that no held-out prompt is trained on.
    """
    groups = _prompt_groups(dataset) if dataset.num_responses == 1 else np.arange(len(dataset))
    order = np.random.default_rng([seed, 0xE7A1]).permutation(int(groups.max()) + 1)
    num_left, held_out_groups = max(1, round(held_out * len(dataset))), []
    sizes = np.bincount(groups)
    for group in order.tolist():
        if sizes[group] <= num_left:
            held_out_groups.append(group)
            num_left -= sizes[group]
        if num_left <= 0:
            break
    held_out_groups = held_out_groups or [int(sizes.argmin())]
    is_held_out = np.isin(groups, held_out_groups)
    if is_held_out.all():
        # The only example, or responses to one prompt, would be held out by any fraction.
        cure = "set it to 0" if len(sizes) == 1 else "lower it"
        raise ValueError(
            f"data.eval_fraction={held_out} leaves nothing to train on of {len(dataset)}; {cure}, "
            "or name held-out data in data.eval"
        )
    return dataset.subset(np.flatnonzero(~is_held_out)), dataset.subset(np.flatnonzero(is_held_out))


def _prompt_groups(dataset: ExampleDataset) -> np.ndarray:
    """Each example's prompt number, by first occurrence, int64 [n]; equal prompts share one.

    Prompts are compared by 64-bit hashes, so that millions of them fit in memory.
    """
    hashes = (
        xxhash.xxh3_64_intdigest(dataset.prompt(index).tobytes()) for index in range(len(dataset))
    )
    values = np.fromiter(hashes, np.uint64, len(dataset))
    _, first, group = np.unique(values, return_index=True, return_inverse=True)
    return np.argsort(np.argsort(first))[group]
