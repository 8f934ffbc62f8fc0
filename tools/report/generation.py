"""Part of a GPU report on generation: our engine, then transformers, by whole models."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
from bench_cases import SEED
from bench_generate import by_transformers
from dpo_steps import random_model

from puzzle_align.layout.hf_config import to_hf_config
from puzzle_align.models.inputs import DTYPES
from puzzle_align.runtime.context import freeze
from puzzle_align.runtime.generation.engine import generate
from puzzle_align.runtime.generation.sampling import Request, Sampling
from report.process import Results, Save
from report.setting import PLAN, Setting, options_of, reason_of, timed, world
from report.watch import gpu_query, sdpa_kernels, watched

OURS, THEIRS = "ours", "transformers"
# Keys of transformers' ``generate``. On CUDA it compiles the decode step of a static cache.
_SAMPLED = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
THEIR_WAYS: dict[str, dict[str, Any]] = {
    THEIRS: {},
    f"{THEIRS}, static cache": {"cache_implementation": "static"},
}
_Answer = Callable[[list[np.ndarray], int], object]  # makes so many tokens for each prompt


def generation(setting: Setting, save: Save) -> None:
    """Time generation by the whole model, ours and then transformers', for several sequences."""
    save(
        {
            "layers": setting.spec.num_hidden_layers,
            "prompt_tokens": prompt_tokens(setting),
            "new_tokens": setting.new_tokens,
            "attention": options_of(setting).attention,
        }
    )
    results: dict[str, Results] = {str(number): {} for number in setting.sequences}
    with watched(gpu_query(setting.device)) as gpu:
        for measure in (_ours, _theirs):
            for way, answer in measure(setting, save):
                for number in setting.sequences:
                    try:
                        figures = _figures(setting, number, answer)
                    except Exception as error:  # noqa: BLE001 - see reason_of
                        figures = {"error": reason_of(error)}
                    results[str(number)][way] = figures
                    save({"sequences": results})
    save({"gpu": gpu or None})


def prompt_tokens(setting: Setting) -> int:
    """Tokens of every prompt."""
    return 4 * setting.new_tokens


def _figures(setting: Setting, number: int, answer: _Answer) -> Results:
    """Times of ``number`` sequences: decoding is what further tokens take beyond the first."""
    generator, vocabulary = np.random.default_rng(SEED), setting.spec.vocab_size
    prompts = [generator.integers(0, vocabulary, prompt_tokens(setting)) for _ in range(number)]
    first, whole = (
        timed(partial(answer, prompts, new_tokens), setting.device, 1)
        for new_tokens in (1, setting.new_tokens)
    )
    steps = setting.new_tokens - 1
    return {
        "prefill_seconds": first,
        "tokens_per_second": number * steps / (whole - first),
        "ms_per_step": (whole - first) / steps * 1e3,
    }


def _ours(setting: Setting, save: Save) -> Iterator[tuple[str, _Answer]]:
    """Our engine's ways to generate."""
    here = world(setting.device)
    options = options_of(setting)
    context = random_model("actor", setting.spec, options, PLAN, here, trained=False)
    freeze(context)

    def answer(prompts: list[np.ndarray], new_tokens: int, eager: bool = True) -> object:
        return generate(
            context,
            [Request(number, prompt) for number, prompt in enumerate(prompts)],
            _sampling(new_tokens),
            prefill_tokens=setting.tokens,
            decode_batch_size=len(prompts),
            enforce_eager=eager,
        )

    prompt = np.zeros(prompt_tokens(setting), dtype=np.int64)
    save({"sdpa_ours": sdpa_kernels(lambda: answer([prompt], 2))})
    for way, eager in setting.eager.items():
        yield f"{OURS}, {way}", partial(answer, eager=eager)


def _theirs(setting: Setting, save: Save) -> Iterator[tuple[str, _Answer]]:
    """transformers' ways to generate, by a model of the same shape and precision."""
    model = transformers_model(setting).eval()
    prompt = np.zeros(prompt_tokens(setting), dtype=np.int64)
    save({"sdpa": sdpa_kernels(lambda: by_transformers(model, [prompt], (), 2, **_SAMPLED))})
    for way, keys in THEIR_WAYS.items():

        def answer(
            prompts: list[np.ndarray], new_tokens: int, keys: dict[str, Any] = keys
        ) -> object:
            return by_transformers(model, prompts, (), new_tokens, **_SAMPLED, **keys)

        yield way, answer


def transformers_model(setting: Setting) -> Any:
    """transformers' model of the same shape and precision, with random weights."""
    import transformers

    config = transformers.AutoConfig.for_model(**to_hf_config(setting.spec))
    dtype = DTYPES[options_of(setting).dtype]
    with world(setting.device).device:
        return transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)


def _sampling(new_tokens: int) -> Sampling:
    """Sampling of responses of ``new_tokens`` tokens."""
    return Sampling(
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        min_new_tokens=new_tokens,
        max_new_tokens=new_tokens,
        stop_token_ids=(),
        seed=SEED,
    )
