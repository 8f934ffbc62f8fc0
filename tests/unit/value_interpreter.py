"""A second interpreter of lowered lists, beside the executor and the validator's own."""

from collections import defaultdict, deque

from puzzle_align.schedules.actions import Action, Kind, edge_of

Held = dict[tuple[int, str, int, int], tuple]  # by rank, model, microbatch and chunk


def run_with_values(
    lists: list[list[Action]], num_chunks: dict[str, int], inputs: Held | None = None
) -> Held:
    """Interprets lowered lists with real queues and checks every value that arrives.

    A receive takes its number in the queue, which compute waits for. ``inputs`` are what earlier
    lists have received; the result is what this one leaves.
    """
    num_ranks = len(lists)
    sent, posted = defaultdict(list), defaultdict(int)
    tickets: dict[tuple, tuple] = {}
    made, inputs = dict[tuple, tuple](), dict(inputs or {})
    queues = [deque(actions) for actions in lists]

    def arriving(rank: int, action: Action, source: int) -> tuple | None:
        key = (rank, action.model, action.microbatch, action.chunk)
        if num_ranks == 1:
            return made.get((rank, action.model, action.microbatch, source, action.kind))
        if action.kind is Kind.FORWARD and key in inputs:
            return inputs.pop(key)
        receive = Kind.RECV_FORWARD if action.kind is Kind.FORWARD else Kind.RECV_BACKWARD
        edge, ticket = tickets[(*key, receive)]
        return sent[edge][ticket] if ticket < len(sent[edge]) else None

    def step(rank: int, action: Action) -> bool:
        model, kind, microbatch, chunk = action.model, action.kind, action.microbatch, action.chunk
        key = (rank, model, microbatch, chunk)
        if kind.is_send:
            compute = Kind.FORWARD if kind is Kind.SEND_FORWARD else Kind.BACKWARD
            sent[edge_of(action, rank, num_ranks)].append(made[(*key, compute)])
            return True
        if not kind.is_compute:
            edge = edge_of(action, rank, num_ranks)
            tickets[(*key, kind)] = (edge, posted[edge])
            posted[edge] += 1
            return True
        forward = kind is Kind.FORWARD
        position, last = chunk * num_ranks + rank, num_ranks * num_chunks[model] - 1
        source = position - 1 if forward else position + 1
        if source not in (-1, last + 1):
            value = arriving(rank, action, source)
            if value is None:
                return False
            assert value == (model, kind, microbatch, source)
        assert forward or (*key, Kind.FORWARD) in made
        made[(*key, kind)] = (model, kind, microbatch, position)
        return True

    while any(queues):
        moved = False
        for rank, queue in enumerate(queues):
            while queue and step(rank, queue[0]):
                queue.popleft()
                moved = True
        assert moved, [str(queue[0]) for queue in queues if queue]
    assert {edge: len(values) for edge, values in sent.items()} == dict(posted)
    for (*key, kind), (edge, ticket) in tickets.items():
        if kind is Kind.RECV_FORWARD and (*key, Kind.FORWARD) not in made:
            inputs[tuple(key)] = sent[edge][ticket]
    return inputs
