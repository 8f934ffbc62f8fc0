"""``puzzle-align inspect``: what it draws is what the job runs."""

import json
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from matplotlib.image import imread

from tests.command import main
from tests.e2e.launch import SMALL, run_job

PIPELINE = "actor.parallel.pipeline_model_parallel_size"
CHUNKS = "actor.parallel.virtual_pipeline_model_parallel_size"
Inspect = Callable[..., tuple[int, list[str], list[str]]]


@pytest.fixture
def inspect(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch) -> Inspect:
    """``inspect(*arguments)`` of a tiny job: exit code, and the lines of stdout and stderr."""
    monkeypatch.setenv("COLUMNS", "100")

    def call(*arguments: str) -> tuple[int, list[str], list[str]]:
        asked = [*SMALL, f"output_dir={tmp_path}/out", *arguments]
        code = main(["inspect", "schedule", *asked])
        shown = capsys.readouterr()
        assert not (tmp_path / "out").exists()
        return code, shown.out.splitlines(), shown.err.splitlines()

    return call


def test_both_placements_are_drawn_and_compared(tmp_path: Path, inspect: Inspect) -> None:
    files = ("--png", f"{tmp_path}/new/a.png", "--trace", f"{tmp_path}/new/a.json")
    code, shown, errors = inspect(f"{PIPELINE}=4", "--microbatches", "4", "--compare", *files)
    assert (code, errors) == (0, [])
    for placement in ("time_shared", "sequential"):
        at = shown.index(f"reference {placement}, 3 steps of 4 microbatches")
        assert [line[:3] for line in shown[at + 1 : at + 5]] == ["P0 ", "P1 ", "P2 ", "P3 "]
        assert re.fullmatch(r"makespan \S+ \S+, idle( P\d \d+\.\d%){4}", shown[at + 6])
        assert max(map(len, shown[at + 1 : at + 6])) <= 100
    assert shown[-3] == "steady state, 4 microbatches a step:"
    speedup = re.search(r"sequential .* a step, idle \S+%; (\S+) times as long", shown[-1])
    assert speedup is not None and 1.2 < float(speedup[1]) < 1.34  # 4/3 at equal costs, M = P
    assert imread(tmp_path / "new" / "a.png").ndim == 3
    shared, sequential = _by_panel(tmp_path / "new" / "a.json")
    assert _actions(sequential) == _expected(num_ranks=4, num_steps=3, num_microbatches=4)
    extra = _actions(shared) - _actions(sequential)  # what runs ahead of step 4
    assert set(extra) <= {(r, f"reference:F{m}.0") for r in range(4) for m in range(4, 8)}
    assert _end(shared) < _end(sequential)


def _by_panel(path: Path) -> list[list[dict[str, Any]]]:
    """The compute actions of every panel of a trace."""
    events = [e for e in json.loads(path.read_text())["traceEvents"] if e["ph"] == "X"]
    pids = sorted({event["pid"] for event in events})
    return [[event for event in events if event["pid"] == pid] for pid in pids]


def _actions(events: list[dict[str, Any]]) -> Counter[tuple[int, str]]:
    return Counter((event["tid"] - 1, event["name"]) for event in events)


def _expected(num_ranks: int, num_steps: int, num_microbatches: int) -> Counter[tuple[int, str]]:
    return Counter(
        (rank, f"{work}{microbatch}.0")
        for rank in range(num_ranks)
        for work in ("reference:F", "actor:F", "actor:B")
        for microbatch in range(num_microbatches)
        for _ in range(num_steps)
    )


def _end(events: list[dict[str, Any]]) -> float:
    return max(event["ts"] + event["dur"] for event in events)


def test_balanced_layers_shorten_the_step_by_the_share_of_the_head(inspect: Inspect) -> None:
    num_microbatches, hidden = 8, 2048
    sizes = {
        "hidden_size": hidden,
        "intermediate_size": 5632,
        "num_hidden_layers": 32,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "vocab_size": 128_000,
    }
    code, shown, errors = inspect(
        *(f"actor.model.config.{key}={size}" for key, size in sizes.items()),
        f"{PIPELINE}=4",
        "actor.parallel.pipeline_layers=auto",
        "dpo.reference_free=true",
        f"--microbatches={num_microbatches}",
        "--compare",
    )
    assert (code, errors) == (0, [])
    # FLOPs of a token, forward and backward: of a layer three times its matrices' and its attention
    # in rows of 64; of the head, which makes half of the tokens' logits and makes them again, four.
    layer = 3 * (2 * (4 * hidden * hidden + 3 * hidden * 5632) + 4 * hidden * 65 // 2)
    head = 4 * 2 * hidden * 128_000 / 2 / layer  # in layers
    assert 3 < head < 4
    assert "actor: llama, (P4, D1, T1, layers 9+9+9+5), ranks 0 to 3" in shown
    # Even, the last rank is the slowest and never waits; balanced, the others set the pace.
    even = 3 * 8 + num_microbatches * (8 + head)
    balanced = (num_microbatches * 9, (num_microbatches + 3) * 9)
    found = re.search(r"policy alone, layers even .* idle \S+%; (\S+) times as long", shown[-1])
    assert found is not None and even / balanced[1] < float(found[1]) < even / balanced[0]
    assert "policy alone, 3 steps of 8 microbatches, layers even" in shown
    seconds = re.search(r"layers even +(\S+) s a step", shown[-1])
    assert seconds is not None
    assert float(seconds[1]) == pytest.approx(even * layer * 64 / 1e12, rel=0.01)


def test_microbatches_are_those_of_the_data(tmp_path: Path, inspect: Inspect) -> None:
    code, shown, _ = inspect(f"{PIPELINE}=2", "--trace", f"{tmp_path}/a.json", "--steps", "2")
    assert code == 0
    title = next(line for line in shown if line.startswith("reference time_shared, 2 steps of "))
    counts = list(map(int, re.findall(r"\d+", title)[1:]))
    counts = counts * 2 if len(counts) == 1 else counts
    (events,) = _by_panel(tmp_path / "a.json")
    backwards = [action for _, action in _actions(events).elements() if action[:7] == "actor:B"]
    assert len(backwards) == 2 * sum(counts)  # on two ranks
    # 16 pairs of up to 64 tokens in rows of 64.
    assert all(1 < count <= 16 for count in counts)


def test_other_ranks_and_other_plans_have_rows_of_their_own(inspect: Inspect) -> None:
    plans = (f"{PIPELINE}=2", "reference.parallel.pipeline_model_parallel_size=1")
    given = ("--microbatches", "2", "--world-size", "3", "placement.reference=concurrent")
    code, shown, _ = inspect(*plans, *given)
    assert code == 0
    at = shown.index("reference concurrent, 3 steps of 2 microbatches")
    assert [line[:7] for line in shown[at + 1 : at + 4]] == ["rank 0 ", "rank 1 ", "rank 2 "]
    assert not re.search("[aA]", shown[at + 3].removeprefix("rank"))  # the policy is not there
    assert shown[-1].startswith("nothing to compare with: with placement.reference=concurrent")


PPO = (
    *("--config", "ppo_tiny"),
    "reward.function=a:b",
    "generation={num_generations: 2, max_new_tokens: 8}",
    "data.max_prompt_length=16",
    "ppo.num_mini_batches=2",
)


def test_the_phases_of_ppo_are_drawn_in_both_orders(tmp_path: Path, inspect: Inspect) -> None:
    code, shown, errors = inspect(
        *PPO, f"{PIPELINE}=4", "--compare", "--trace", f"{tmp_path}/a.json"
    )
    assert (code, errors) == (0, [])
    # Two segments of 16 + 2 * 8 tokens are a row: 16 prompts are 8 rows, a mini-batch's are 4.
    assert "microbatches: the most possible, with prompts of 16 tokens, 2 responses of 8" in shown
    titles = (
        "score, time_shared, reference, critic: 8 microbatches",
        "score, sequential, reference, critic: 8 microbatches",
        "learn, time_shared, actor, critic: 4 microbatches",
        "learn, sequential, actor, critic: 4 microbatches",
    )
    assert [line for line in shown if line in titles] == list(titles)
    speedup = re.search(r"learn  sequential .* idle \S+%; (\S+) times as long", shown[-1])
    assert speedup is not None and float(speedup[1]) > 1.1
    score, _, shared, sequential = _by_panel(tmp_path / "a.json")
    assert {event["name"].partition(":")[2][0] for event in score} == {"F"}
    assert _actions(shared) == _actions(sequential)
    assert _end(shared) < _end(sequential)


def test_phases_on_ranks_apart_are_side_by_side(inspect: Inspect) -> None:
    apart = ("actor.ranks=0-1", "critic.ranks=2-3", "--world-size", "4", "--microbatches", "2")
    code, shown, errors = inspect(*PPO, *apart)
    assert (code, errors) == (0, [])
    at = shown.index("learn, concurrent, actor, critic: 2 microbatches")
    assert [line[:7] for line in shown[at + 1 : at + 3]] == ["rank 0 ", "rank 2 "]
    assert shown[-1] == (
        "    no time-sharing: no two models have the same ranks and the same plan: "
        "actor (P1, D2, T1), critic (P1, D2, T1)"
    )


MISTAKES = {
    "no reference": (
        (f"{PIPELINE}=2", "dpo.reference_free=true", "--compare"),
        "--compare: no reference runs while the policy trains; leave it out",
    ),
    "no bubbles": (
        ("--compare",),
        "--compare: no time-sharing, since reference (P1, D1, T1): one pipeline rank leaves no "
        "bubbles; leave it out",
    ),
    "odd microbatches": (
        (f"{PIPELINE}=2", f"{CHUNKS}=2", "--microbatches", "3"),
        "--microbatches 3: with model chunks a step takes a multiple of the 2 pipeline ranks; "
        "choose one",
    ),
    "steps of ppo": (
        (*PPO, "--steps", "2"),
        "--steps: stage ppo is drawn with one pass of each phase; leave it out",
    ),
    "no bubbles of ppo": (
        (*PPO, "--compare"),
        "--compare: no time-sharing (score: reference (P1, D1, T1): one pipeline rank leaves no "
        "bubbles; learn: actor (P1, D1, T1): one pipeline rank leaves no bubbles); leave it out",
    ),
    "ranks": (
        (f"{PIPELINE}=2", "--world-size", "3"),
        "actor.parallel: P·T = 2 does not divide 3 ranks: start a multiple of 2, or change the "
        "sizes",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_line_with_its_cure(name: str, inspect: Inspect) -> None:
    arguments, line = MISTAKES[name]
    code, _, errors = inspect("--microbatches", "2", *arguments)
    assert (code, errors) == (2, [f"error: {line}"])


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path, inspect: Inspect) -> None:
    (tmp_path / "file").touch()
    for flag in ("--png", "--trace"):
        code, _, errors = inspect("--microbatches", "2", flag, f"{tmp_path}/file/a")
        assert code == 2 and len(errors) == 1
        assert errors[0].startswith(f"error: {flag} {tmp_path}/file/a: cannot be written (")


@pytest.mark.parametrize("arguments", [["nothing"], ["schedule", "--config", "x", "--steps", "0"]])
def test_wrong_usage_exits_with_2(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["inspect", *arguments])
    assert stopped.value.code == 2


def test_a_run_draws_what_it_measured_beside_what_was_predicted(tmp_path: Path) -> None:
    settings = (f"{PIPELINE}=2", "telemetry.trace_steps=1", "max_steps=4", f"output_dir={tmp_path}")
    job = run_job(*SMALL, *settings)
    assert job.returncode == 0, job.stderr
    names = ["step_3.json", "step_3.png", "step_3.txt"]
    assert sorted(path.name for path in (tmp_path / "trace").iterdir()) == names
    predicted, measured = _by_panel(tmp_path / "trace" / "step_3.json")
    assert _actions(predicted) == _actions(measured)
    for rank in (1, 2):
        orders = ([e["name"] for e in panel if e["tid"] == rank] for panel in (predicted, measured))
        assert len(set(map(tuple, orders))) == 1


def test_an_iteration_of_ppo_is_drawn_with_its_score_and_its_mini_batches(tmp_path: Path) -> None:
    settings = (f"{PIPELINE}=2", "telemetry.trace_steps=1", "max_steps=3", f"output_dir={tmp_path}")
    ppo = ("--config", "ppo_tiny", *SMALL[2:], "data.max_prompt_length=16")
    small = ("generation.max_new_tokens=8", "ppo.num_mini_batches=2", "ppo.ppo_epochs=1")
    job = run_job(*ppo, *small, *settings)
    assert job.returncode == 0, job.stderr
    predicted, measured = _by_panel(tmp_path / "trace" / "step_3.json")
    assert _actions(predicted) == _actions(measured)
    models = {event["name"].partition(":")[0] for event in measured}
    assert models == {"actor", "critic", "reference"}
    # Of each trained model a row is passed forward and back on both ranks in each mini-batch; the
    # critic's are scored first.
    ran = Counter(event["name"][: event["name"].index(":") + 2] for event in measured)
    assert ran["actor:F"] == ran["actor:B"] == ran["critic:B"] > 0
    assert ran["critic:F"] == ran["critic:B"] + ran["reference:F"]
    for rank in (1, 2):
        orders = ([e["name"] for e in panel if e["tid"] == rank] for panel in (predicted, measured))
        assert len(set(map(tuple, orders))) == 1
