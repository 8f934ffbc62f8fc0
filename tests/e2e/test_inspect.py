"""``puzzle-align inspect``: what it draws is what the job runs, or what its routing table holds."""

import json
import re
from collections import Counter
from collections.abc import Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from matplotlib.image import imread

from tests.command import main
from tests.e2e.conftest import Command
from tests.e2e.launch import SMALL, run_job

PIPELINE = "actor.parallel.pipeline_model_parallel_size"
CHUNKS = "actor.parallel.virtual_pipeline_model_parallel_size"


@pytest.fixture
def inspect(command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Command:
    """``inspect(*arguments)``: the schedule of a tiny job."""
    monkeypatch.setenv("COLUMNS", "100")

    def call(*arguments: str) -> tuple[int, list[str], list[str]]:
        found = command("inspect", "schedule", *SMALL, f"output_dir={tmp_path}/out", *arguments)
        assert not (tmp_path / "out").exists()
        return found

    return call


@pytest.fixture
def reshard(command: Command) -> Command:
    """``reshard(config, *arguments)``: how its weights move."""
    return partial(command, "inspect", "reshard", "--config")


def test_both_placements_are_drawn_and_compared(tmp_path: Path, inspect: Command) -> None:
    files = ("--png", f"{tmp_path}/new/a.png", "--trace", f"{tmp_path}/new/a.json")
    code, shown, errors = inspect(f"{PIPELINE}=4", "--microbatches", "4", "--compare", *files)
    assert (code, errors) == (0, [])
    for placement in ("time_shared", "sequential"):
        at = shown.index(f"reference {placement}, 3 steps of 4 microbatches")
        assert [line[:3] for line in shown[at + 1 : at + 5]] == ["P0 ", "P1 ", "P2 ", "P3 "]
        assert re.fullmatch(r"makespan \d+%, idle( P\d \d+\.\d%){4}", shown[at + 6])
        assert max(map(len, shown[at + 1 : at + 6])) <= 100
    assert shown[-3] == "steady state, 4 microbatches a step:"
    speedup = re.search(r"sequential .* a step, idle \S+%; (\S+) times as long", shown[-1])
    assert speedup is not None and 1.2 < float(speedup[1]) < 1.34  # 4/3 at equal costs, M = P
    assert imread(tmp_path / "new" / "a.png").ndim == 3
    shared, sequential = _by_panel(tmp_path / "new" / "a.json")
    trained = _ran(3, ("actor:F", "actor:B"), range(4))
    assert _actions(sequential) == trained + _ran(3, ("reference:F",), range(4))
    # Every step runs the next one's reference forwards, and the first step its own, too.
    first, ahead = _ran(1, ("reference:F",), range(4)), _ran(3, ("reference:F",), range(4, 8))
    assert _actions(shared) == trained + first + ahead
    assert _end(shared) < _end(sequential)


def _by_panel(path: Path) -> list[list[dict[str, Any]]]:
    """The compute actions of every panel of a trace."""
    events = [e for e in json.loads(path.read_text())["traceEvents"] if e["ph"] == "X"]
    pids = sorted({event["pid"] for event in events})
    return [[event for event in events if event["pid"] == pid] for pid in pids]


def _actions(events: list[dict[str, Any]]) -> Counter[tuple[int, str]]:
    return Counter((event["tid"] - 1, event["name"]) for event in events)


def _ran(
    num_steps: int, works: Sequence[str], microbatches: Sequence[int]
) -> Counter[tuple[int, str]]:
    """Actions of four ranks that each run these in each of some steps."""
    return Counter(
        (rank, f"{work}{microbatch}.0")
        for rank in range(4)
        for work, microbatch in product(works, microbatches)
        for _ in range(num_steps)
    )


def _end(events: list[dict[str, Any]]) -> float:
    return max(event["ts"] + event["dur"] for event in events)


def test_balanced_layers_shorten_the_step_by_the_share_of_the_head(inspect: Command) -> None:
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
    share = re.search(r"layers even +(\d+)% a step", shown[-1])
    assert share is not None
    assert int(share[1]) == round(100 * float(found[1])), "the job's own step is the whole"


def test_microbatches_are_those_of_the_data(tmp_path: Path, inspect: Command) -> None:
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


def test_other_ranks_and_other_plans_have_rows_of_their_own(inspect: Command) -> None:
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


def test_the_phases_of_ppo_are_drawn_in_both_orders(tmp_path: Path, inspect: Command) -> None:
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


def test_what_few_microbatches_cannot_gain_is_said(inspect: Command) -> None:
    """For equal costs Equation (1) is (M + P - 1) 2 / (2 M + P - 1): 10 / 7; here they differ."""
    code, shown, errors = inspect(*PPO, f"{PIPELINE}=4", "--microbatches", "2")
    assert (code, errors) == (0, [])
    speedup = re.search(r"learn  sequential .*; (\S+) times as long", shown[-2])
    found = re.fullmatch(
        r"    2 microbatches on 4 pipeline ranks: (\S+) times faster, by PUZZLE's Equation \(1\) "
        r"(\S+) times, which would keep more activations on a rank than .*",
        shown[-1],
    )
    assert speedup is not None and found is not None
    assert float(found[1]) == pytest.approx(float(speedup[1]), abs=0.005)
    assert float(found[1]) + 0.1 < float(found[2]) < 10 / 7


def test_phases_on_ranks_apart_are_side_by_side(inspect: Command) -> None:
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
        "--compare: no time-sharing, since reference (P1, D2, T1): one pipeline rank leaves no "
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
        "--compare: no time-sharing (score: reference (P1, D2, T1): one pipeline rank leaves no "
        "bubbles; learn: actor (P1, D2, T1): one pipeline rank leaves no bubbles); leave it out",
    ),
    "ranks": (
        (f"{PIPELINE}=2", "--world-size", "3"),
        "actor.parallel: P·T = 2 does not divide 3 ranks: start a multiple of 2, or change the "
        "sizes",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_line_with_its_cure(name: str, inspect: Command) -> None:
    arguments, line = MISTAKES[name]
    code, _, errors = inspect("--microbatches", "2", *arguments)
    assert (code, errors) == (2, [f"error: {line}"])


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path, inspect: Command) -> None:
    (tmp_path / "file").touch()
    for flag in ("--png", "--trace"):
        code, _, errors = inspect("--microbatches", "2", flag, f"{tmp_path}/file/a")
        assert code == 2 and len(errors) == 1
        assert errors[0].startswith(f"error: {flag}: {tmp_path}/file/a cannot be written (")


@pytest.mark.parametrize("arguments", [["nothing"], ["schedule", "--config", "x", "--steps", "0"]])
def test_wrong_usage_exits_with_2(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["inspect", *arguments])
    assert stopped.value.code == 2


def test_volumes_of_a_7b_model_beside_the_least(reshard: Command) -> None:
    code, shown, errors = reshard("ppo_7b", "--from", "1,1,8", "--to", "1,4,2")
    assert (code, errors) == (0, [])
    # Six sixteenths of 13.5 GiB; on eight ranks.
    for name in ("received", "sent", "lower bound"):
        assert f"{name}: 5.1 GiB a rank at most, 40.5 GiB in all" in shown
    assert "to   (P1, D4, T2), ranks 0, 4, 1, 5, 2, 6, 3, 7" in shown
    assert shown[-1].split() == ["from", "7", *"----", *["1.7", "GiB"] * 3, "-", "|", "@@@", "|"]
    # On nodes of 4 this order would tear all groups: they get more, and stay on a node.
    code, shown, _ = reshard("ppo_7b", "--from", "1,1,8", "--to", "1,4,2", "--ranks-per-node", "4")
    assert code == 0 and "to   (P1, D4, T2), ranks 0 to 7" in shown
    code, shown, _ = reshard("ppo_7b", "--from", "1,2,4", "--to", "1,4,2", "--ranks-per-node", "4")
    assert code == 0 and "between nodes of 4: 0 B" in shown


def test_the_job_s_own_switch_of_plans(reshard: Command) -> None:
    plan = "generation.parallel.tensor_model_parallel_size=2"
    code, shown, errors = reshard("ppo_tiny", plan, "--world-size", "2", "--routes")
    assert (code, errors) == (0, [])
    assert shown[1:3] == ["from (P1, D2, T1), ranks 0 to 1", "to   (P1, D1, T2), ranks 0 to 1"]
    assert "received: 0 B a rank at most, 0 B in all" in shown  # replicas have all of it
    code, shown, _ = reshard("ppo_tiny", "--from", "2,1,1", "--to", "1,1,2", "--routes")
    (counted,) = (re.match(r"table: (\d+) routes", line) for line in shown if "table" in line)
    routes = [line for line in shown if re.match(r"  [01] -> [01]: \S+\[", line)]
    assert counted is not None and len(routes) == int(counted[1]) > 0


def test_relays_are_marked(reshard: Command) -> None:
    code, shown, _ = reshard("ppo_tiny", "--from", "1,1,1", "--to", "1,4,1", "--routes")
    assert code == 0
    (counted,) = (
        re.match(r"table: \d+ routes, (\d+) of them relays", s) for s in shown if "table" in s
    )
    relays = [line for line in shown if line.endswith(", relayed")]
    assert counted is not None and len(relays) == int(counted[1]) > 0
    assert all(re.match(r"  [123] -> [123], [123]: ", line) for line in relays)


def test_many_ranks_show_their_busiest_links(reshard: Command) -> None:
    code, shown, _ = reshard("dpo_7b", "--from", "4,2,4", "--to", "1,16,2")
    assert code == 0 and sum(" -> " in line for line in shown) == 16
    assert re.fullmatch(r"  and \d+ links more, none of them busier", shown[-1])


def test_the_picture_is_drawn_where_it_can_be(tmp_path: Path, reshard: Command) -> None:
    plans = ("ppo_tiny", "--from", "2,1,1", "--to", "1,1,2")
    code, shown, errors = reshard(*plans, "--png", f"{tmp_path}/new/a.png")
    assert (code, errors) == (0, [])
    assert shown == reshard(*plans)[1]
    assert imread(tmp_path / "new" / "a.png").ndim == 3
    (tmp_path / "file").touch()
    code, _, errors = reshard(*plans, "--png", f"{tmp_path}/file/a.png")
    assert code == 2 and len(errors) == 1
    assert errors[0].startswith(f"error: --png: {tmp_path}/file/a.png cannot be written (")


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["ppo_tiny"], "error: nothing moves in this job: set generation.parallel .*"),
        (["dpo_tiny"], "error: nothing moves in this job: give --from and --to"),
        (["ppo_tiny", "--from", "1,1,2"], "error: --from and --to: give both, or neither"),
        (
            ["ppo_tiny", "--from", "2,1,1", "--to", "1,1,2", "--world-size", "4"],
            "error: --world-size: --from and --to say how many ranks there are; leave it out",
        ),
        (
            ["ppo_7b", "--from", "1,1,1", "--to", "1,1,16"],
            r"error: \(P1, D1, T16\): tensor size 16 does not divide num_key_value_heads=8 .*",
        ),
    ],
)
def test_what_does_not_move_is_one_line(reshard: Command, arguments: list[str], line: str) -> None:
    code, shown, errors = reshard(*arguments)
    assert code == 2 and not shown
    assert len(errors) == 1 and re.fullmatch(line, errors[0])


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
    smaller = ("generation.num_generations=2", "actor.model.config.num_hidden_layers=2")
    job = run_job(*ppo, *small, *smaller, *settings)
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
