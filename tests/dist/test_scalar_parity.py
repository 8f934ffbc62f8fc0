"""Scalar heads on two ranks: transformers' scores of the same weights, and what plans share.

The parent process saves tiny sequence classifiers and scores every prompt and response alone; the
ranks load them under several plans and score one packed, prefix-shared row.
"""

from pathlib import Path

import torch

from puzzle_align.layout.model import with_scalar_head
from puzzle_align.models.chunk import Predictions
from tests.bounds import LOGIT_BOUND, fp32_bound
from tests.dist.chunk_runs import (
    LAYOUT,
    PLANS,
    SIZES,
    VARIANTS,
    assert_checkpoints_move,
    assert_gradients_agree,
    groups_of_all,
    has_classifier,
    run,
    save_model,
    saved_chunks,
    saved_spec,
    sequences,
    small_spec,
)
from tests.dist.spawn import run_ranks

CLASSIFIERS = {name: variant for name, variant in VARIANTS.items() if has_classifier(variant[0])}
LAST_TOKENS = [15, 20, 27]  # of the row's responses: 10 + 6, 5 more, 21 + 4 + 3


def test_rewards_equal_hugging_face(tmp_path: Path) -> None:
    for name, (family, changes) in CLASSIFIERS.items():
        _save_classifier(tmp_path / name, family, changes)
    worst = run_ranks(_rewards_on_ranks, 2, str(tmp_path))[1]
    for case, error in sorted(worst.items()):
        print(f"{case:45s} {error:.1e}")
    assert set(worst) == {f"{name} {plan}" for name in CLASSIFIERS for plan in PLANS}
    assert max(worst.values()) <= LOGIT_BOUND


def test_gradients_and_checkpoints_do_not_depend_on_the_plan(tmp_path: Path) -> None:
    run_ranks(_gradients_and_checkpoints_on_ranks, 2, str(tmp_path))


def _save_classifier(directory: Path, family: str, changes: dict) -> None:
    changes = {**changes, "num_labels": 1}
    model = save_model(directory, family, changes, "SequenceClassification")
    tokens = torch.randint(0, SIZES["vocab_size"], (1, LAYOUT.num_tokens))
    with torch.no_grad():
        scores = [model(tokens[:, where]).logits[0, 0] for where in sequences()]
    torch.save((tokens, torch.stack(scores)), directory / "expected.pt")


def _asked() -> Predictions:
    return Predictions(torch.tensor(LAST_TOKENS), torch.zeros(len(LAST_TOKENS), dtype=torch.int64))


def _rewards_on_ranks(rank: int, _world_size: int, folder: str) -> dict[str, float]:
    worst, groups = {}, groups_of_all(rank)
    for name in CLASSIFIERS:
        directory = Path(folder) / name
        spec = saved_spec(directory)
        assert spec.head == "scalar"
        tokens, expected = torch.load(directory / "expected.pt")
        assert expected.std() > 0.01
        for label, plan in PLANS.items():
            chunks = saved_chunks(directory, plan, groups[label])
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
    groups = groups_of_all(rank)
    torch.manual_seed(3)
    tokens = torch.randint(0, 300, (1, LAYOUT.num_tokens))
    spec = with_scalar_head(small_spec("qwen3"))
    assert_gradients_agree(spec, tokens, _asked(), groups, ("none", "full"))
    ring = [
        "(2,1,1)",
        "(1,1,2) sequence parallel",
        "(2,1,1) interleaved",
        "(2,1,1) uneven",
        "(2,1,1)",
    ]
    assert_checkpoints_move(Path(folder), spec, ring, groups)
