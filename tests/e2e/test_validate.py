"""``--validate``: every shipped config as it stands, and every problem of a bad job at once."""

import json
import re
from pathlib import Path

import pytest

from tests.unit.test_configs import RANKS

FEW = "data.num_synthetic=1024"  # else most of the time goes into making pairs


@pytest.mark.parametrize("keys", [(FEW,), pytest.param((), marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", RANKS)
def test_a_shipped_config_is_valid_without_its_machine(
    name: str, keys: tuple[str, ...], tmp_path: Path, train
) -> None:
    ranks = RANKS[name][1]
    asked = ("--config", name, "--validate", "--world-size", str(ranks), *keys)
    code, shown, errors = train(*asked, f"output_dir={tmp_path}/out")
    assert (code, errors) == (0, [])
    assert shown[-1] == f"valid: {name.split('_')[0]} on {ranks} ranks; nothing was trained"
    assert not (tmp_path / "out").exists()


def test_it_tells_what_the_job_would_do(tmp_path: Path, train) -> None:
    rows = [{"prompt": "p" * n, "chosen": "cc", "rejected": "r"} for n in range(1, 101)]
    lines = [*(json.dumps(row) for row in rows), "{", json.dumps({"prompt": "p"})]
    (tmp_path / "pairs.jsonl").write_text("\n".join(lines))
    shown = _valid(
        train,
        *("dpo_tiny", f"data.train={tmp_path}/pairs.jsonl", f"output_dir={tmp_path}/out"),
        *("data.format=auto", "actor.model.random_weights=true", "tokenizer.path=byte"),
        *("data.eval_fraction=0", "data.max_length=64", "data.on_error=skip"),
        *("global_batch_size=32", "max_steps=-1", "num_train_epochs=3"),
    )
    assert "train, sequential: reference, actor" in shown
    # BOS + n + the longer response and EOS is over 64 from n = 61 on.
    assert (
        "data: 100 pairs, 40 of them truncated; skipped 2 bad records: "
        "1 invalid JSON, 1 missing field"
    ) in shown
    assert "  tokens                50%      90%      99%  longest" in shown
    assert "  prompt                 52       61       61       61" in shown
    assert "  pair, shared           57       66       66       66" in shown
    assert "steps: 12 (4 an epoch), each of 32 pairs" in shown  # 100 pairs, 32 a step
    assert any(line.startswith("microbatches of a step and data rank: ") for line in shown)
    assert any(line.split()[:1] == ["total"] for line in shown)


@pytest.mark.parametrize(
    ("job", "warnings"),
    [
        (("dpo_tiny", "max_steps=10"), []),
        (
            ("dpo_tiny", "max_steps=9"),
            [
                "optimizer.warmup_steps=10, but this optimizer takes 9 steps in the run: the "
                "learning rate never reaches optimizer.lr=0.0003"
            ],
        ),
        (  # two epochs of two mini-batches in an iteration
            ("ppo_tiny", "max_steps=3", "critic.optimizer.warmup_steps=13"),
            [
                "critic.optimizer.warmup_steps=13, but this optimizer takes 12 steps in the run: "
                "the learning rate never reaches critic.optimizer.lr=0.003"
            ],
        ),
        (  # the critic learns alone in the first
            ("ppo_tiny", "max_steps=3", "ppo.critic_warmup=1", "optimizer.warmup_steps=9"),
            [
                "optimizer.warmup_steps=9, but this optimizer takes 8 steps in the run: the "
                "learning rate never reaches optimizer.lr=0.003"
            ],
        ),
        (("grpo_tiny", "critic.optimizer.warmup_steps=1000"), []),  # there is no critic
        (
            ("dpo_tiny", "data.eval_fraction=0"),
            [
                "telemetry.eval_every: 50, but no data are held out to evaluate on; set data.eval, "
                "or data.eval_fraction above 0"
            ],
        ),
    ],
)
def test_it_warns_of_settings_that_cannot_take_effect(
    job: tuple[str, ...], warnings: list[str], tmp_path: Path, train
) -> None:
    shown = _valid(train, *job, FEW, f"output_dir={tmp_path}/out")
    assert [line for line in shown if "warning" in line] == [f"warning: {w}" for w in warnings]


def test_it_tells_which_number_of_ranks_it_assumes(tmp_path: Path, train, monkeypatch) -> None:
    """The estimates are for that number, and on the fewest ranks a job may seem not to fit."""
    split = "actor.parallel.tensor_model_parallel_size=2"
    job = ("dpo_tiny", split, FEW, f"output_dir={tmp_path}/out")
    for written, number, why in (
        (4, 4, "engine.world_size"),
        ("null", 2, "the fewest that the job needs"),
        (1, 2, "the fewest that the job needs"),
    ):
        assumed, *shown = _valid(train, *job, f"engine.world_size={written}")
        assert assumed == f"ranks: {number}, {why}; give another number as --world-size N"
        assert shown[-1] == f"valid: dpo on {number} ranks; nothing was trained"
    given = _valid(train, *job, "--world-size", "4")
    monkeypatch.setenv("WORLD_SIZE", "4")  # as torchrun sets it
    assert _valid(train, *job) == given
    assert given[-1] == "valid: dpo on 4 ranks; nothing was trained"
    assert not any(line.startswith("ranks: ") for line in given)


def test_it_tells_which_ranks_a_concurrent_reference_has(tmp_path: Path, train) -> None:
    shown = _valid(
        train,
        *("dpo_tiny", "placement.reference=concurrent", FEW, f"output_dir={tmp_path}/out"),
        "reference.parallel.pipeline_model_parallel_size=2",
    )
    assert "train, concurrent: reference; actor" in shown
    assert shown[2].startswith("reference: llama, 854k parameters, (P2, D1, T1), ranks 1 to 2, ")
    assert shown[-1] == "valid: dpo on 3 ranks; nothing was trained"
    held = _memory(shown)
    assert held["GiB on a rank of"] == ["0", "1", "2"]
    assert held["reference weights"][0] == "0" != held["actor weights"][0]
    for part in ("weights", "gradients", "optimizer"):
        assert held[f"actor {part}"][1:] == ["0"] * 2
    assert "0" not in (*held["reference weights"][1:], *held["train"], *held["total"])


def test_it_tells_what_a_ppo_job_would_do(tmp_path: Path, train) -> None:
    shown = _valid(
        train,
        *("ppo_tiny", "actor.ranks=0-1", "actor.parallel.pipeline_model_parallel_size=2"),
        *("critic.ranks='2'", "critic.parallel={}", f"output_dir={tmp_path}/out"),
        "data={format: synthetic, num_synthetic: 100, max_length: 32}",
        "generation={num_generations: 4, max_new_tokens: 16}",
        *("packing.row_tokens=512", "global_batch_size=32", "ppo.num_mini_batches=2"),
        *("max_steps=-1", "num_train_epochs=3"),
    )
    assert shown[2].startswith("critic: llama, 821k parameters, (P1, D1, T1), rank 2, random")
    assert "data: 100 prompts, 0 of them truncated" in shown
    assert "iterations: 10, each of 32 prompts and 128 responses" in shown  # 300 prompts
    # Six segments of 16 + 4 * 16 tokens are a row: 32 prompts are 6 rows, a mini-batch's are 3.
    assert "score, concurrent: reference (6 microbatches); critic (6 microbatches)" in shown
    assert "learn, concurrent: actor (3 microbatches); critic (3 microbatches)" in shown
    held = _memory(shown)
    assert held["GiB on a rank of"] == ["0", "1", "2"]
    assert held["critic weights"][:2] == held["critic optimizer"][:2] == ["0"] * 2
    assert held["generate"][2] == held["actor weights"][2] == "0"


def test_rows_that_do_not_hold_all_responses_are_reported_with_what_they_cost(
    tmp_path: Path, train
) -> None:
    """Eight responses of 2,048 to prompts of 1,024 tokens, in rows of 8,192: two together."""
    shown = _valid(
        train,
        *("ppo_7b", "--world-size", "8", f"output_dir={tmp_path}/out"),
        *("data.max_length=3072", "generation.max_new_tokens=2048", "generation.num_generations=8"),
    )
    assert (
        "packing.row_tokens=8192 holds 2 of 8 responses with their prompt at the greatest length: "
        "prompts are repeated 4 times, which is 17.6% more tokens; 17408 would hold them all"
    ) in shown


def test_decoding_without_graphs_is_said_with_the_reason(tmp_path: Path, train) -> None:
    job = ("ppo_7b", f"output_dir={tmp_path}/out", "data.num_synthetic=256", "--world-size", "8")
    slower = "decoding: kernel by kernel, not as CUDA graphs, so slower: "
    eager = "generation.enforce_eager is true"
    for overrides, reason in (
        ((), None),
        (("generation.parallel=null",), None),  # under T = 2, as it trains
        (("generation.enforce_eager=true",), eager),
        (("generation.parallel=null", "generation.enforce_eager=true"), eager),
    ):
        shown = _valid(train, *job, *overrides)
        sampling = [line for line in shown if line.startswith("actor, while it samples: ")]
        own_plan = "generation.parallel=null" not in overrides
        assert sampling == ["actor, while it samples: (P1, D8, T1), ranks 0 to 7"] * own_plan
        lines = [line for line in shown if line.startswith("decoding")]
        assert len(lines) == (reason is not None)
        assert reason is None or lines[0].startswith(slower + reason)


def test_tensor_groups_on_several_nodes_get_a_warning(tmp_path: Path, train, monkeypatch) -> None:
    job = ("dpo_tiny", f"output_dir={tmp_path}/out", "data.num_synthetic=256", "--world-size", "2")
    torn = "warning: actor: 1 of 1 tensor groups, such as ranks 0 to 1, lie on several nodes of 1"
    for near, expected in (("1", True), ("2", False)):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", near)
        shown = _valid(train, *job, "actor.parallel.tensor_model_parallel_size=2")
        assert any(line.startswith(torn) for line in shown) is expected


def test_memory_is_of_pairs_as_long_as_they_may_be(tmp_path: Path, train) -> None:
    """Four pipeline ranks have four microbatches under way, however short the generated pairs."""
    short, long = (
        _trained_activations(train, tmp_path, FEW, "data.synthetic_length=" + length)
        for length in ("null", "4000")
    )
    assert short == long > 1


def _valid(train, config: str, *arguments: str) -> list[str]:
    """The lines that a valid job shows."""
    code, shown, errors = train("--config", config, "--validate", *arguments)
    assert (code, errors) == (0, [])
    return shown


def _trained_activations(train, folder: Path, *overrides: str) -> float:
    shown = _valid(train, "dpo_70b", "--world-size", "64", f"output_dir={folder}/out", *overrides)
    return float(_memory(shown)["train"][0])


def _memory(shown: list[str]) -> dict[str, list[str]]:
    """The table of estimates: cells by the name of their line."""
    table = [line for line in shown if line.startswith("  ")]
    start = next(n for n, line in enumerate(table) if line.startswith("  GiB on a rank of"))
    return {line[2:20].strip(): re.split(r" {2,}", line[20:].strip()) for line in table[start:]}


def test_problems_of_a_ppo_job_are_listed_a_line_each(tmp_path: Path, train) -> None:
    code, shown, errors = train(
        *("--config", "ppo_tiny", "--validate", f"output_dir={tmp_path}/out"),
        *("reward.function=nowhere:f", "actor.model.random_weights=true", "tokenizer.path=byte"),
        *(f"critic.model.path={tmp_path}/none", "ppo.num_mini_batches=3"),
        *("global_batch_size=32", "generation.num_generations=4", "max_steps=7"),
    )
    assert code == 2
    assert "iterations: 7, each of 32 prompts and 128 responses" in shown
    expected = [
        "ppo.num_mini_batches: 3 do not divide the 32 prompts",
        f"critic.model.path: {tmp_path}/none: no such directory; give",
        "reward.function=nowhere:f: no module 'nowhere'",
    ]
    assert len(errors) == len(expected), errors
    for line, start in zip(errors, expected, strict=True):
        assert line.startswith(f"error: {start}"), line


@pytest.mark.parametrize(
    ("override", "line"),
    [
        (
            "reward.url=localhost:8000",
            "reward.url: localhost:8000 is no address of a server; write http://host:port/path",
        ),
        (
            "reward.timeout=1e30",
            "reward.timeout: 1e+30 is out of range; choose more than 0, at most 2000000.0",
        ),
    ],
)
def test_no_function_is_loaded_by_wrong_keys(override: str, line: str, tmp_path, train) -> None:
    overrides = (f"output_dir={tmp_path}/out", override)
    code, _, errors = train("--config", "ppo_tiny", "--validate", *overrides)
    assert (code, errors) == (2, [f"error: {line}"])


def test_all_problems_are_listed_a_line_each(tmp_path: Path, train) -> None:
    (tmp_path / "file").touch()
    code, shown, errors = train(
        *("--config", "dpo_7b", "--validate", "--world-size", "7"),
        *(f"actor.model.path={tmp_path}/model", "tokenizer.path=byte", "data.format=auto"),
        *(f"data.train={tmp_path}/none.jsonl", f"output_dir={tmp_path}/file/out"),
        *("checkpoint.resume=must", "optimizer.min_lr=1"),
    )
    assert code == 2
    assert not any(line.startswith("valid") for line in shown)
    expected = [
        "optimizer.min_lr: 1.0 is above",
        "actor.parallel: P·T = 2 does not divide 7 ranks",
        f"actor.model.path: {tmp_path}/model: no such directory; give",
        f"output_dir: {tmp_path}/file/out cannot be made",
        "checkpoint.resume=must: no checkpoint",
        f"{tmp_path}/none.jsonl: no such file; check the path",
    ]
    assert len(errors) == len(expected), errors
    for line, start in zip(errors, expected, strict=True):
        assert line.startswith(f"error: {start}"), line


def test_a_wrong_seed_is_one_line(tmp_path: Path, train) -> None:
    """Data that it splits are not read."""
    out = f"output_dir={tmp_path}"
    code, _, errors = train("--config", "dpo_tiny", "--validate", "seed=-1", out)
    assert (code, [line[:32] for line in errors]) == (2, ["error: seed: -1 is out of range;"])


def test_ranks_other_than_0_leave_it_to_rank_0(tmp_path: Path, train, monkeypatch) -> None:
    monkeypatch.setenv("RANK", "1")
    assert train("--config", "dpo_tiny", "--validate", f"output_dir={tmp_path}") == (0, [], [])
