"""Table of a batch's responses, with columns: log-probabilities, values, rewards, and others.

Shapes: B examples of K responses; response ``r = b * K + k`` is response k of example b.

A column *by response* is a tensor [B, K] on the device. Each rank has the values of the responses
that it computed, zero elsewhere; the sum over ranks is the exact column, since one output rank
computes each response. A column *by token* is on the hosts: a response's owner alone has its
values, and ``fetch`` sends them to the ranks whose rows hold the response.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.distributed as dist

from puzzle_align.models.host_copy import copied
from puzzle_align.runtime.groups.collectives import patient_group
from puzzle_align.runtime.row_input import RowInput

REFERENCE = "ref_logps"  # column [B, K] by which a frozen context feeds a trained one's loss

Items = dict[int, np.ndarray]  # by response, [places] or [places, columns]


@dataclass(frozen=True)
class Responses:
    """Facts of all responses of a table, equal on all ranks: int64 [B * K] each."""

    lengths: np.ndarray  # number of tokens
    owners: np.ndarray  # global ranks

    def of_rank(self, rank: int) -> list[int]:
        """Responses that a rank owns, in order."""
        return np.flatnonzero(self.owners == rank).tolist()


@dataclass
class Table:
    """This rank's columns of a batch; only ``give`` and ``fetch`` need ``responses``."""

    responses: Responses | None = None
    by_response: dict[str, torch.Tensor] = field(default_factory=dict)  # [B, ...] on the device
    by_token: dict[str, Items] = field(default_factory=dict)

    def of_row(self, row: RowInput) -> dict[str, torch.Tensor]:
        """Return a row's part of every column: by response [B', ...], by token float64 [N]."""
        columns_of_row = {name: column[row.examples] for name, column in self.by_response.items()}
        for name, items in self.by_token.items():
            values = [np.zeros(0), *(items[response] for response in row.responses.tolist())]
            columns_of_row[name] = copied(np.concatenate(values), row.tokens.device)
        return columns_of_row

    def of_examples(self, examples: np.ndarray, num_responses: int) -> "Table":
        """Return the columns by token, renumbered for a batch of these examples."""
        numbers = (examples[:, None] * num_responses + np.arange(num_responses)).ravel().tolist()
        return Table(
            by_token={
                name: {place: items[r] for place, r in enumerate(numbers) if r in items}
                for name, items in self.by_token.items()
            }
        )

    def give(self, name: str, items: Items, sources: np.ndarray, lengths: np.ndarray) -> None:
        """Send a column from the ranks that computed it to the responses' owners. Collective.

        Args:
            items: this rank's values, float64 [places].
            sources: int64 [B * K], the rank that sends each response's values.
            lengths: int64 [B * K], number of each response's values.
        """
        assert self.responses is not None, "nobody owns the responses"
        given = exchange(
            {response: values[:, None] for response, values in items.items()},
            self.responses.of_rank(dist.get_rank()),
            sources=sources,
            lengths=lengths,
            num_columns=1,
        )
        self.by_token[name] = {response: values[:, 0] for response, values in given.items()}

    def fetch(
        self,
        names: Sequence[str],
        wanted: Sequence[int],
        dtype: type[np.generic] = np.float64,
    ) -> "Table":
        """Fetch columns by token, all of one dtype, of wanted responses from owners. Collective."""
        assert self.responses is not None, "nobody owns the responses"
        owned = self.responses.of_rank(dist.get_rank())
        fetched = exchange(
            {r: np.stack([self.by_token[name][r] for name in names], axis=1) for r in owned},
            wanted,
            sources=self.responses.owners,
            lengths=self.responses.lengths,
            num_columns=len(names),
            dtype=dtype,
        )
        return Table(
            by_token={
                name: {response: values[:, place] for response, values in fetched.items()}
                for place, name in enumerate(names)
            }
        )


def exchange(
    held: Mapping[int, np.ndarray],
    wanted: Sequence[int],
    *,
    sources: np.ndarray,
    lengths: np.ndarray,
    num_columns: int,
    dtype: type[np.generic] = np.float64,
) -> Items:
    """Send ragged items directly from ranks that hold them to ranks that want them. Collective.

    A rank stores only the items that it holds or wants.

    Args:
        held: this rank's items by number, ``[lengths[i], num_columns]`` of ``dtype``, including all
            that other ranks want from it.
        wanted: numbers of the items that this rank wants; may be empty, or include held ones.
        sources: the rank that sends each item, int64 [n], the same on all ranks.
        lengths: places of each item, int64 [n], the same on all ranks.
        num_columns: values at each place.
    """
    world_size = dist.get_world_size()
    wanted_by = _wanted_by_rank(wanted, len(lengths), world_size)
    rank = dist.get_rank()
    sent_items = np.flatnonzero(sources == rank)
    sent = [sent_items[wanted_by[other, sent_items]] for other in range(world_size)]
    received = [np.flatnonzero(wanted_by[rank] & (sources == other)) for other in range(world_size)]
    parts = [held[item] for items in sent for item in items.tolist()]
    outgoing = torch.from_numpy(np.concatenate([np.zeros((0, num_columns), dtype), *parts]))
    num_incoming = [int(lengths[items].sum()) for items in received]
    incoming = torch.empty(sum(num_incoming), num_columns, dtype=outgoing.dtype)
    dist.all_to_all_single(
        incoming,
        outgoing,
        num_incoming,
        [int(lengths[items].sum()) for items in sent],
        group=patient_group(),
    )
    order = np.concatenate(received)
    ends = np.cumsum(lengths[order])
    pieces = np.split(incoming.numpy(), ends[:-1]) if len(order) else []
    return dict(zip(order.tolist(), pieces, strict=True))


def _wanted_by_rank(wanted: Sequence[int], num_items: int, world_size: int) -> np.ndarray:
    """Gather all ranks' wanted items: bool [world size, n]."""
    is_wanted = torch.zeros(num_items, dtype=torch.uint8)
    is_wanted[torch.tensor(wanted, dtype=torch.int64)] = 1
    table = torch.empty(world_size * num_items, dtype=torch.uint8)
    dist.all_gather_into_tensor(table, is_wanted, group=patient_group())
    return table.view(world_size, num_items).numpy().astype(bool)
