"""Generation with a placed model, by a KV cache and a pipeline that decoding keeps full."""

from puzzle_align.runtime.generation.engine import generate
from puzzle_align.runtime.generation.sampling import Request, Response, Sampling

__all__ = ["Request", "Response", "Sampling", "generate"]
