"""Dynamic sampling: groups that teach something, joined and renumbered over batches."""

from collections.abc import Sequence

import numpy as np
import pytest

from puzzle_align.config.sections.rl import FilterGroupsConfig, PPOConfig
from puzzle_align.runtime.columns import Responses, Table
from puzzle_align.runtime.generation.sampling import Response
from puzzle_align.runtime.liveness.failure import CannotGoOn
from puzzle_align.stages.rl import filtering
from puzzle_align.stages.rl.filtering import Collected, collected, joined, num_to_learn
from puzzle_align.stages.rl.rewards import Rewarded
from puzzle_align.stages.rl.rollout import Rollout
from tests.refusals import refusal

NAN = float("nan")


def rollout_of(
    prompts: Sequence[int], owned: Sequence[int], k: int, batch: int = 0, cut: Sequence[int] = ()
) -> Rollout:
    """Samples of lengths 1, 2, ...; rank 0 owns some, with a token of the sample's number."""
    number = len(prompts) * k
    stopped = np.array([sample not in cut for sample in range(number)])
    owners = np.array([0 if sample in owned else 1 for sample in range(number)])
    sampled = {
        sample: Response(sample, np.array([100 * batch + sample]), np.zeros(1, np.float32), True)
        for sample in owned
    }
    return Rollout(
        iteration=3,
        batch=batch,
        prompts=np.array(prompts),
        prompt_lengths=np.array(prompts) + 50,
        stopped=stopped,
        responses=Responses(np.arange(1, number + 1) + 100 * batch, owners),
        num_generations=k,
        sampled=sampled,
    )


def batch_of(
    rollout: Rollout, kept: Sequence[bool], extra: dict[str, list[str]], logged: float
) -> Collected:
    """Its samples' rewards and log-probabilities are their numbers over all batches."""
    numbers = [100 * rollout.batch + sample for sample in rollout.sampled]
    table = Table(rollout.responses)
    table.by_token["old_logps"] = {
        sample: np.array([float(n)]) for sample, n in zip(rollout.sampled, numbers, strict=True)
    }
    scores = np.array(numbers, dtype=np.float64)
    rewarded = Rewarded(scores, scores[:, None] * [1, 2], extra, {"seen": [logged]}, scores + 0.5)
    return Collected(rollout, table, rewarded, np.array(kept))


def test_kept_groups_are_renumbered_with_all_that_is_theirs() -> None:
    """Two responses a prompt; of the first batch groups 1 and 2 are kept, of the second 0, 2."""
    first = rollout_of([10, 11, 12], [0, 1, 4, 5], 2, cut=[3])
    second = rollout_of([13, 14, 15], [0, 1, 4, 5], 2, batch=1)
    batches = [
        batch_of(first, [False, True, True], {"found": ["a", "b", "c", "d"]}, 1.0),
        batch_of(second, [True, False, True], {"other": ["e", "f", "g", "h"]}, 2.0),
    ]
    rollout, table, rewarded = joined(batches, 3)
    assert (rollout.iteration, rollout.batch, rollout.num_generations) == (3, 0, 2)
    assert rollout.prompts.tolist() == [11, 12, 13]
    assert rollout.prompt_lengths.tolist() == [61, 62, 63]
    assert rollout.lengths.tolist() == [3, 4, 5, 6, 101, 102]
    assert rollout.responses.owners.tolist() == [1, 1, 0, 0, 0, 0]
    assert rollout.stopped.tolist() == [True, False, True, True, True, True]
    tokens = {sample: response.tokens.tolist() for sample, response in rollout.sampled.items()}
    assert tokens == {2: [4], 3: [5], 4: [100], 5: [101]}
    logps = {sample: values.tolist() for sample, values in table.by_token["old_logps"].items()}
    assert logps == {2: [4.0], 3: [5.0], 4: [100.0], 5: [101.0]}
    assert table.responses is not None and table.responses.of_rank(0) == [2, 3, 4, 5]
    assert rewarded.scores.tolist() == [4, 5, 100, 101]
    assert rewarded.by_function.tolist() == [[4, 8], [5, 10], [100, 200], [101, 202]]
    assert rewarded.extra == {"found": ["c", "d", None, None], "other": [None, None, "e", "f"]}
    assert rewarded.metrics == {"seen": [1.0, 2.0]}
    assert rewarded.baselines is not None
    assert rewarded.baselines.tolist() == [4.5, 5.5, 100.5, 101.5]
    assert joined(batches, 4)[0].prompts.tolist() == [11, 12, 13, 15]
    rollout, table, _ = joined(batches[1:], 2)
    assert [*rollout.sampled] == [*table.by_token["old_logps"]] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("scores", "cut", "is_kept"),
    [
        ([1.0, 1.0, 1.0], [], False),
        ([1.0, 1.0, 0.5], [], True),
        ([0.5, 1.0, 1.0], [], True),
        ([2.0, 3.0, 4.0], [], False),  # all clipped to 1.5
        ([0.0, 0.0, 0.0], [1], True),  # less a penalty
        ([1.0, 1.0, 1.0], [0, 1, 2], False),
        ([NAN, 1.0, 0.5], [], True),
        ([NAN, 1.0, NAN], [], False),
        ([NAN, NAN, NAN], [], False),
    ],
)
def test_a_group_is_kept_whose_scores_differ_as_they_are_trained_on(
    scores: list[float], cut: list[int], is_kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(filtering, "sum_on_host", lambda flags: flags)
    config = PPOConfig(cliprange_reward=1.5, missing_eos_penalty=0.25)
    rollout = rollout_of([7, 8], [3, 4, 5], 3, cut=[3 + sample for sample in cut])
    rewarded = Rewarded(np.array(scores), np.zeros((3, 0)))
    found = collected(config, rollout, Table(rollout.responses), rewarded)
    assert found.kept.tolist() == [False, is_kept]


def test_fewer_groups_are_whole_mini_batches_if_they_may_be_fewer() -> None:
    rollout = rollout_of([1, 2, 3], [], 2)
    batches = [batch_of(rollout, [True, False, True], {}, 0.0)] * 2 + [
        batch_of(rollout, [False, True, False], {}, 0.0)
    ]
    smaller, never = FilterGroupsConfig(allow_smaller=True), FilterGroupsConfig()
    assert num_to_learn(batches, 5, 2, never) == 5
    assert num_to_learn(batches, 4, 2, never) == 4
    assert num_to_learn(batches, 8, 2, smaller) == 4
    for wanted, multiple, config, cure in (
        (8, 8, smaller, ", or look at the rewards (training needs at least 8 such prompts)"),
        (8, 8, never, ", or look at the rewards (training needs at least 8 such prompts)"),
        (8, 2, never, ", look at the rewards, or set ppo.filter_groups.allow_smaller=true"),
    ):
        line = refusal(
            lambda w=wanted, m=multiple, c=config: num_to_learn(batches, w, m, c), CannotGoOn
        )
        assert line.startswith(f"ppo.filter_groups: in 3 batches only 5 of {wanted} prompts have ")
        assert line.endswith(f"generation.temperature{cure}")
