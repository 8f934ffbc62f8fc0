"""Generation with a placed model: a KV cache, and a pipeline kept full while it decodes."""

from puzzle_align.runtime.generation.engine import generate
from puzzle_align.runtime.generation.sampling import Request, Response, Sampling

__all__ = ["Request", "Response", "Sampling", "generate"]
