"""Measure generation: seconds of a layer and of the rest, for prefill and for decode.

It runs the jobs' engine; ``stamping`` separates steps, and the layers' part of each. Parts of a
CUDA graph cannot be measured: on CUDA steps run under ``enforce_eager``, and the host fetches after
each; a job with graphs takes less time.
"""

from dataclasses import dataclass, replace

import numpy as np
import torch

from puzzle_align.runtime.context import Context
from puzzle_align.runtime.generation.engine import generate
from puzzle_align.runtime.generation.sampling import Request, Sampler, Sampling
from puzzle_align.runtime.profiler.timing import Samples, repeated, seconds, stamping

# Decode steps that are no samples: in the first the cache may grow by half, which is rare in a job;
# the last has no stamp at its end.
_UNCOUNTED = 2


@dataclass(frozen=True, kw_only=True)
class GenerationCase:
    """A batch of ``sequences`` whose prompts have ``prompt_tokens`` tokens each."""

    sequences: int
    prompt_tokens: int
    vocab_size: int  # of the whole model: every tensor rank samples from it
    sampling: Sampling


def measure_prefill(context: Context, case: GenerationCase, repeats: int) -> Samples:
    """Measure seconds of a prefill batch of distinct prompts: ``layer`` and ``rest``."""

    def sample() -> Samples:
        with stamping(context) as stamps:
            whole = _generation(context, case, new_tokens=1, shared=False)
            (layers,) = stamps.took("layers", "head")
        rest = whole - layers + _more_drawing(context, case)
        return {"layer": [layers / context.spec.num_hidden_layers], "rest": [rest]}

    return repeated(sample, repeats)


def measure_decode(context: Context, case: GenerationCase, steps: int, repeats: int) -> Samples:
    """Measure seconds of a decode step: ``layer`` and ``rest``; a generation has ``steps`` samples.

    All sequences share one prompt, computed once: a step's time does not depend on it. During the
    measurement a sequence has ``decode_context(case.prompt_tokens, steps)`` tokens on average.
    """

    def sample() -> Samples:
        with stamping(context) as stamps:
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
    """Tokens in each sequence's cache, on average over the measured steps."""
    return prompt_tokens + 1 + (steps - 1) // 2


def last_length(prompt_tokens: int, steps: int) -> int:
    """Final number of tokens of each sequence in a measured decode batch."""
    return prompt_tokens + 1 + _UNCOUNTED + steps


def _generation(context: Context, case: GenerationCase, *, new_tokens: int, shared: bool) -> float:
    """Measure seconds until every sequence has ``new_tokens``."""
    generator = np.random.default_rng(0)
    vocabulary = context.spec.vocab_size
    shape = (1 if shared else case.sequences, case.prompt_tokens)
    prompts = generator.integers(0, vocabulary, shape)
    if not shared:  # equal neighbours would be computed once
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
    """Extra seconds of sampling from the whole vocabulary instead of the shard's.

    In a job tensor ranks gather their logits and all sample from the whole vocabulary; the measured
    shard has only its part.
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
