"""Scalar heads on two ranks: transformers' scores of the same weights, and what plans share.

The parent process saves tiny sequence classifiers and scores every prompt and response alone; the
ranks load them under several plans and score one packed, prefix-shared row.
"""

from itertools import pairwise
from pathlib import Path

import torch
import torch.distributed as dist

from puzzle_align.layout.hf_config import from_hf_config, read_hf_config
from puzzle_align.layout.model import ModelOptions, with_scalar_head
from puzzle_align.models.build import Predictions, build_chunk
from puzzle_align.models.cpu import install_cpu_patches
from puzzle_align.models.hf_weights import load_weights, open_weights
from tests.bounds import LOGIT_BOUND, fp32_bound
from tests.dist.chunk_runs import (
    LAYOUT,
    PLANS,
    SIZES,
    VARIANTS,
    assert_checkpoint_moves,
    assert_gradients_equal,
    loaded_chunks,
    own_groups,
    random_spec,
    reduce_gradients,
    run,
    train_run,
)
from tests.dist.spawn import run_ranks

LAST_TOKENS = [15, 20, 27]  # of the row's responses: 10 + 6, 5 more, 21 + 4 + 3


def test_rewards_equal_hugging_face(tmp_path: Path) -> None:
    for name, (family, changes) in VARIANTS.items():
        _save_classifier(tmp_path / name, family, changes)
    worst = run_ranks(_rewards_on_ranks, 2, str(tmp_path))[1]
    for case, error in sorted(worst.items()):
        print(f"{case:45s} {error:.1e}")
    assert set(worst) == {f"{name} {plan}" for name in VARIANTS for plan in PLANS}
    assert max(worst.values()) <= LOGIT_BOUND


def test_gradients_and_checkpoints_do_not_depend_on_the_plan(tmp_path: Path) -> None:
    run_ranks(_gradients_and_checkpoints_on_ranks, 2, str(tmp_path))


def _save_classifier(directory: Path, family: str, changes: dict) -> None:
    import transformers

    config = getattr(transformers, f"{family}Config")(**{**SIZES, **changes, "num_labels": 1})
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForSequenceClassification")(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                parameter.add_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(directory)
    tokens = torch.randint(0, config.vocab_size, (1, LAYOUT.num_tokens))
    scores = []
    with torch.no_grad():
        for segment in LAYOUT.segments:
            prompt = torch.arange(segment.start, segment.prompt_end)
            for span in segment.response_spans():
                alone = tokens[:, torch.cat((prompt, torch.arange(*span)))]
                scores.append(model(alone).logits[0, 0])
    torch.save((tokens, torch.stack(scores)), directory / "expected.pt")


def _asked() -> Predictions:
    return Predictions(torch.tensor(LAST_TOKENS), torch.zeros(len(LAST_TOKENS), dtype=torch.int64))


def _rewards_on_ranks(rank: int, _world_size: int, folder: str) -> dict[str, float]:
    install_cpu_patches()
    worst = {}
    groups = {label: own_groups(plan, rank) for label, plan in PLANS.items()}
    for name in VARIANTS:
        directory = Path(folder) / name
        spec = from_hf_config(read_hf_config(directory), str(directory))
        assert spec.head == "scalar"
        tokens, expected = torch.load(directory / "expected.pt")
        assert expected.std() > 0.01
        for label, plan in PLANS.items():
            chunks = [
                build_chunk(spec, ModelOptions(), plan, groups[label], chunk=number)
                for number in range(plan.virtual_pipeline)
            ]
            for chunk in chunks:
                load_weights(chunk, spec, open_weights(directory))
            with torch.no_grad():
                everywhere = run(chunks, tokens, None)
                rewards = run(chunks, tokens, _asked())
            if everywhere is not None and rewards is not None:
                assert (rewards.dtype, rewards.shape) == (torch.float32, (3,))
                # The head's kernel may sum in another order for fewer tokens.
                bound = fp32_bound(spec.hidden_size) * everywhere.abs().max().item()
                torch.testing.assert_close(everywhere[LAST_TOKENS], rewards, rtol=0, atol=bound)
                worst[f"{name} {label}"] = (rewards - expected).abs().max().item()
    return worst


def _gradients_and_checkpoints_on_ranks(rank: int, _world_size: int, folder: str) -> None:
    install_cpu_patches()
    groups = {label: own_groups(plan, rank) for label, plan in PLANS.items()}
    torch.manual_seed(3)
    tokens = torch.randint(0, 300, (1, LAYOUT.num_tokens))
    spec = with_scalar_head(random_spec("qwen3", qk_norm=True))
    full = loaded_chunks(spec, "(1,1,1)", groups)[0]
    train_run([full], tokens, _asked())
    for label in PLANS:
        for recompute in ("none", "full"):
            chunks = loaded_chunks(spec, label, groups, recompute)
            train_run(chunks, tokens, _asked())
            reduce_gradients(chunks, spec)
            assert_gradients_equal(chunks, full, spec)
            if PLANS[label].tensor == 2:
                _assert_equal_on_ranks(chunks[-1].head_weight.grad, chunks[-1].pg_collection.tp)
    ring = [
        "(2,1,1)",
        "(1,1,2) sequence parallel",
        "(2,1,1) interleaved",
        "(2,1,1) uneven",
        "(2,1,1)",
    ]
    for number, (saved, loaded) in enumerate(pairwise(ring)):
        assert_checkpoint_moves(Path(folder) / str(number), spec, saved, loaded, groups)


def _assert_equal_on_ranks(gradient: torch.Tensor | None, group: dist.ProcessGroup) -> None:
    """Bitwise: the head's copies must never drift apart."""
    assert gradient is not None
    parts = [torch.empty_like(gradient) for _ in range(group.size())]
    dist.all_gather(parts, gradient, group=group)
    assert torch.equal(parts[0], parts[1])
