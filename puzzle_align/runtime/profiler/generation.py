"""Times of a batch that generates: a layer's part and all the rest, of prefill and of decode.

The engine of jobs does it; ``Stamps`` tells its steps apart, and the layers' part of them. Nobody
sees into a CUDA graph: on CUDA the steps are measured as ``enforce_eager`` has them, one a look of
the host, and a job that has graphs takes less.
"""

from dataclasses import dataclass, replace

import numpy as np
import torch

from puzzle_align.runtime.context import Context
from puzzle_align.runtime.generation import Request, Sampling, generate
from puzzle_align.runtime.generation.sampler import Sampler
from puzzle_align.runtime.profiler.timing import Samples, Stamps, repeated, seconds

# Where the prompts fill the cache it grows at the first step after them, and then has room for half
# as many tokens again: such a step is rare in a job, and no sample. Of the last one no end is seen.
_UNCOUNTED = 2


@dataclass(frozen=True, kw_only=True)
class GenerationCase:
    """A batch of ``sequences`` whose prompts have ``prompt_tokens`` tokens each."""

    sequences: int
    prompt_tokens: int
    vocab_size: int  # of the whole model: every tensor rank draws from it
    sampling: Sampling


def measure_prefill(context: Context, case: GenerationCase, repeats: int) -> Samples:
    """Seconds of a prefill batch of distinct prompts: ``layer``, and ``rest``."""
    (chunk,) = context.chunks

    def sample() -> Samples:
        with Stamps(chunk, context.device) as stamps:
            whole = _generation(context, case, new_tokens=1, shared=False)
            (layers,) = stamps.took("layers", "head")
        rest = whole - layers + _more_drawing(context, case)
        return {"layer": [layers / context.spec.num_hidden_layers], "rest": [rest]}

    return repeated(sample, repeats)


def measure_decode(context: Context, case: GenerationCase, steps: int, repeats: int) -> Samples:
    """Seconds of a decode step: ``layer``, and ``rest``; ``steps`` samples a generation.

    The sequences have one prompt, which is computed once: what a step takes is the same. While
    they are measured they have ``decode_context(case.prompt_tokens, steps)`` tokens on average.
    """
    (chunk,) = context.chunks

    def sample() -> Samples:
        with Stamps(chunk, context.device) as stamps:
            _generation(context, case, new_tokens=1 + _UNCOUNTED + steps, shared=True)
            whole = stamps.from_start_to_start()[-steps:]
            layers = stamps.took("layers", "head")[-steps - 1 : -1]
        drawing = _more_drawing(context, case)
        return {
            "layer": [x / context.spec.num_hidden_layers for x in layers],
            "rest": [x - y + drawing for x, y in zip(whole, layers, strict=True)],
        }

    return repeated(sample, repeats)


def decode_context(prompt_tokens: int, steps: int) -> int:
    """Tokens in the cache of each sequence, on average over the steps that are measured."""
    return prompt_tokens + 1 + (steps - 1) // 2


def last_length(prompt_tokens: int, steps: int) -> int:
    """Tokens that each sequence of a measured decode batch comes to have."""
    return prompt_tokens + 1 + _UNCOUNTED + steps


def _generation(context: Context, case: GenerationCase, *, new_tokens: int, shared: bool) -> float:
    """Seconds until every sequence has ``new_tokens``."""
    generator = np.random.default_rng(0)
    vocabulary = context.spec.vocab_size
    shape = (1 if shared else case.sequences, case.prompt_tokens)
    prompts = generator.integers(0, vocabulary, shape)
    if not shared:  # neighbours that are equal would be computed once
        prompts[:, 0] = np.arange(case.sequences) % vocabulary
    requests = [Request(n, prompts[n % len(prompts)]) for n in range(case.sequences)]
    sampling = replace(
        case.sampling, min_new_tokens=0, max_new_tokens=new_tokens, stop_token_ids=()
    )
    return seconds(
        lambda: generate(
            context,
            requests,
            sampling,
            prefill_tokens=prompts.size,
            decode_batch_size=case.sequences,
            num_scheduler_steps=1,
            enforce_eager=True,
        ),
        context.device,
    )


def _more_drawing(context: Context, case: GenerationCase) -> float:
    """Seconds that drawing from the whole vocabulary takes beyond drawing from the shard's.

    Tensor ranks gather each other's logits and all draw from the whole; a shard alone has its own.
    """
    if case.vocab_size == context.spec.vocab_size:
        return 0.0
    ids = np.arange(case.sequences)
    places = np.zeros_like(ids)
    sampler = Sampler(replace(case.sampling, stop_token_ids=()), context.device)

    def draw_from(vocabulary: int) -> float:
        logits = torch.zeros(case.sequences, vocabulary, device=context.device)
        (draws,) = sampler.draws(ids, places, 1)
        return seconds(lambda: sampler.next_tokens(logits, draws), context.device)

    return draw_from(case.vocab_size) - draw_from(context.spec.vocab_size)
