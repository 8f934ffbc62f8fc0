"""Configs: what is wrong is said where it stands; what is right comes back equal."""

import json
import math
import re
from dataclasses import is_dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from puzzle_align.config.job import JobConfig
from puzzle_align.config.load import dump_job, find_config, load_file, load_job
from puzzle_align.config.schema import all_keys, key_values, section_keys
from puzzle_align.config.sections.models import ParallelConfig
from puzzle_align.config.sections.optimizer import OptimizerConfig
from puzzle_align.config.sections.preference import DPOConfig
from puzzle_align.config.stages import STAGES
from tests.refusals import refusal


def error(text: str, *overrides: str) -> str:
    """The one line that a wrong config gives."""
    return refusal(lambda: load_job(text, overrides, source="job.yaml"))


def test_nothing_written_is_the_defaults() -> None:
    for text in ("", "# only a comment\n", "{}"):
        assert load_job(text) == JobConfig()


def test_values_reach_their_fields() -> None:
    job = load_job("seed: 7\ndpo:\n  beta: 1\n  loss_type: ipo\nactor:\n  parallel:\n    {}\n")
    assert job == replace(
        JobConfig(),
        seed=7,
        dpo=DPOConfig(beta=1.0, loss_type="ipo"),
        actor=replace(JobConfig().actor, parallel=ParallelConfig()),
    )
    assert type(job.dpo.beta) is float
    lines = load_job('tokenizer: {chat_template: "a\\nb"}')
    assert lines.tokenizer.chat_template == "a\nb"


@pytest.mark.parametrize(
    ("written", "value"),
    [("1e-6", 1e-6), ("1E-6", 1e-6), ("5.e-7", 5e-7), (".5e1", 5.0), ("'1e-6'", 1e-6), ("2", 2.0)],
)
def test_numbers_as_people_write_them(written, value) -> None:
    assert load_job(f"optimizer: {{lr: {written}}}").optimizer == OptimizerConfig(lr=value)
    assert load_job("", [f"optimizer.lr={written}"]).optimizer.lr == value


def test_scientific_notation_is_a_number_in_a_free_mapping_too() -> None:
    job = load_job("actor: {model: {config: {rms_norm_eps: 1e-5, name: 1e-5x}}}")
    assert job.actor.model.config == {"rms_norm_eps": 1e-5, "name": "1e-5x"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("seed: 1\ndpo:\n  betta: 0.1", "job.yaml:3: unknown key 'dpo.betta'; .* 'dpo.beta'$"),
        ("beta: 0.1", "job.yaml:1: unknown key 'beta'; .* 'dpo.beta'$"),
        ("actr: {}", "job.yaml:1: unknown key 'actr'; .* 'actor'$"),
        ("1: {}", "job.yaml:1: unknown key '1'"),
        ("betta: 1\nstage: [dpo]", "job.yaml:1: unknown key 'betta'"),
        ("<<: {seed: 1}", "job.yaml:1: '<<': tag 'merge' is not taken; leave it out"),
        ("seed: 1\nseed: 2", "job.yaml:2: 'seed' is given twice"),
        ("actor: {model: {config: {a: 1,\n a: 2}}}", "job.yaml:2: 'actor.model.config.a' is given"),
        ("\nseed: true", "job.yaml:2: seed: expected an integer, got true"),
        ("seed: 1.0", "job.yaml:1: seed: expected an integer, got 1.0"),
        ("dpo: {beta: true}", "dpo.beta: expected a number, got true"),
        ("dpo: {beta: .nan}", "dpo.beta: expected a number, got nan"),
        ("dpo: {beta: [1]}", "dpo.beta: expected a number, got a list"),
        ("data: {shuffle: 1}", "data.shuffle: expected true or false, got 1"),
        ("data: {train: 7}", "data.train: expected text, got 7; write '\"7\"'"),
        ("data: {train: [a]}", "data.train: expected text, got a list$"),
        ("data:\n", "job.yaml:1: data: null is not a value here"),
        ("data: 3", "job.yaml:1: data: expected a mapping of keys, got 3"),
        ("seed: null", "job.yaml:1: seed: null is not a value here"),
        (
            "dpo:\n  loss_type: sigmod",
            "job.yaml:2: dpo.loss_type: 'sigmod' .* did you mean sigmoid",
        ),
        ("actor: {model: {config: 3}}", "actor.model.config: expected a mapping, got 3"),
        (
            "generation:\n  stop_token_ids: 2",
            r"job.yaml:2: .*ids: expected a list of integers, got 2; write '\[2\]'$",
        ),
        (
            "generation: {stop_token_ids: [1, a]}",
            r"generation.stop_token_ids\[1\]: expected an integer, got 'a'$",
        ),
        (
            "generation: {stop_token_ids: [true]}",
            r"stop_token_ids\[0\]: expected an integer, got true$",
        ),
        ("dpo: {loss_type: [sigmoid, sigmod]}", "loss_type: 'sigmod' is not .* did you mean sigmo"),
        ("dpo: {loss_type: [1]}", r"dpo.loss_type\[0\]: expected text, got 1$"),
        ("reward: {function: 3}", "expected text or a list of texts, got 3; write '\"3\"'$"),
        ("reward: {function: [a:b, 3]}", r"reward.function\[1\]: expected text, got 3$"),
        ("reward: {function: {a: b}}", "expected text or a list of texts, got a mapping$"),
        ("reward: {weights: 0.5}", r"expected a list of numbers, got 0.5; write '\[0.5\]'$"),
        ("reward: {weights: a}", "expected a list of numbers, got 'a'$"),
        ("reward: {weights: [1, .inf]}", r"weights\[1\]: expected a number, got inf$"),
        ("reward: {weights: [true]}", r"weights\[0\]: expected a number, got true$"),
        (
            "actor: {parallel: {pipeline_layers: automatic}}",
            "pipeline_layers: expected a list of integers or auto, got 'automatic'$",
        ),
        ("- seed", "job.yaml:1: a config is a mapping"),
        ("seed: 1\ndpo: {", "job.yaml:2: not valid YAML"),
        ("seed: 1\n---\nseed: 2", "job.yaml:2: not valid YAML"),
        ("seed: \x00", "job.yaml:1: not valid YAML"),
        ("? [a]\n: 1", "job.yaml:1: a mapping or list cannot be a key"),
        ("seed: !!python/object:os.system 1", "job.yaml:1: '1': tag 'python/object:"),
        ("seed: 2024-13-45", "job.yaml:1: seed: expected an integer, got '2024-13-45'"),
        ("seed: &a [*a]", "job.yaml:1: an alias stands in itself; write out its"),
        ("seed: *a", "job.yaml:1: not valid YAML: found undefined alias 'a'"),
        ("seed: !!int ''", "job.yaml:1: '' is not a valid int; write one"),
        ("seed: !!timestamp x", "job.yaml:1: 'x': tag 'timestamp' is not taken"),
        ("seed: !!bool x", "job.yaml:1: 'x' is not a valid bool; write one"),
        ("dpo: !own {beta: 1}", "job.yaml:1: tag '!own' is not taken; leave it out"),
        ("dpo:\n - " + "[" * 900 + "]" * 900, "job.yaml:1: nested too deep"),
        ("seed: " + "9" * 5000, "job.yaml:1: '9999.*' is not a valid int; write one"),
        (
            "actor: {model: {config: {a: [1, .inf]}}}",
            r"job.yaml:1: actor.model.config.a\[1\]: expected a finite number, got inf",
        ),
        ("seed: 010", "job.yaml:1: '010': YAML 1.1 reads it in base 8 or 60; write"),
        ("seed: -1:30", "job.yaml:1: '-1:30': YAML 1.1 reads it in base 8 or 60"),
        ("optimizer: {lr: 1:30.5}", "job.yaml:1: '1:30.5': YAML 1.1 reads it in base"),
        ("output_dir: -" + "9" * 400, "job.yaml:1: output_dir: expected text, got -9999"),
        (r'output_dir: "a\0b"', r"job.yaml:1: 'a.*b' has an unprintable character; take it out"),
        (r'output_dir: "\ud800"', "job.yaml:1: .* has an unprintable character"),
        (r'output_dir: "\U00110000"', "job.yaml:1: not valid YAML: chr"),
        (r'output_dir: "a\nb"', r"job.yaml:1: output_dir: 'a b' has '\\n' in it; take it out"),
        (
            r'output_dir: "a\u2028b"',
            r"job.yaml:1: output_dir: '.*' has '\\u2028' in it; take it out",
        ),
        (
            "output_dir: a/" + "x" * 300,
            "output_dir: 'a/xx.*' has a name of more than 255 bytes in i",
        ),
        ("output_dir: " + "x/" * 3000, "output_dir: 'x/x/.*' is longer than 3000 bytes"),
        ("output_dir: ~/runs", "output_dir: '~/runs' begins with ~, which only a shell expands; w"),
        ("data: {train: $D/a.jsonl}", r"data.train: '\$D/a.jsonl' begins with \$, which only a sh"),
        ("null: 1", "job.yaml:1: unknown key 'None'; keys are texts"),
    ],
)
def test_one_line_says_where_and_what(text, message) -> None:
    assert re.search(message, error(text))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("dpo.betta=1", "override 'dpo.betta=1': unknown key 'dpo.betta'; .* 'dpo.beta'$"),
        ("actr.model.path=x", "override 'actr.model.path=x': unknown key 'actr'"),
        ("dpo.beta=x", "override 'dpo.beta=x': dpo.beta: expected a number, got 'x'"),
        ("dpo.beta=", "override 'dpo.beta=': dpo.beta: null is not a value"),
        ("dpo.beta={", "override 'dpo.beta={': not valid YAML"),
        ("dpo.beta", "override 'dpo.beta': write it as key=value"),
        ("=1", "override '=1': write it as key=value"),
        ("seed.x=1", "override 'seed.x=1': 'seed' is a value, not a section with 'x'"),
        ("packing.layout.x=1", "override 'packing.layout.x=1': packing.layout: expected text"),
        ("dpo={betta: 1}", "override 'dpo={betta: 1}': unknown key 'dpo.betta'"),
        ("actor.parallel.recompute=x", "override 'actor.parallel.recompute=x': actor.parallel.rec"),
        (".".join(["a"] * 40) + "=1", "unknown key 'a'"),
        ("actor.model.path=" + "x" * 2000, "override 'actor.model.path=xxx.*' has a name of more"),
        ("x" * 9000 + "=1", "unknown key 'xxx"),
        ("dpo.loss_type=" + "x" * 9000, "'xxx.*' is not one of sigmoid"),
    ],
)
def test_a_wrong_override_names_itself(override, message) -> None:
    found = error("seed: 1\ndpo: {beta: 0.2}", override)
    assert re.search(message, found) and len(found) < 600


def test_a_word_may_stand_for_a_list() -> None:
    for written, expected in (
        ("auto", ParallelConfig(pipeline_layers="auto")),
        ("[3, 2]", ParallelConfig(pipeline_layers=[3, 2])),
        ("null", ParallelConfig()),
    ):
        job = load_job("", [f"actor.parallel.pipeline_layers={written}"])
        assert job.actor.parallel == expected
        assert load_job(dump_job(job)) == job


def test_lists_of_texts_and_numbers_and_one_text_for_a_list() -> None:
    for written, expected in (("a:b", "a:b"), ("[a:b,c:d]", ["a:b", "c:d"]), ("[]", [])):
        job = load_job("stage: ppo", [f"reward.function={written}"])
        assert job.reward.function == expected
        assert job.reward.functions == (("a:b",) if expected == "a:b" else tuple(expected))
        assert load_job(dump_job(job)) == job
    assert load_job("").reward.functions == ()
    weights = load_job("stage: ppo", ["reward.weights=[1, -0.5, 1e-3]"]).reward.weights or []
    assert weights == [1.0, -0.5, 0.001] and {type(weight) for weight in weights} == {float}


def test_overrides_win_in_order_and_keep_the_rest() -> None:
    text = "dpo: {beta: 0.2, loss_type: ipo}\nactor: {parallel: null}"
    job = load_job(text, ["dpo.beta=0.3", "dpo.beta=4e-1", "actor.parallel.recompute=full"])
    assert job.dpo == DPOConfig(beta=0.4, loss_type="ipo")
    assert job.actor.parallel == ParallelConfig(recompute="full")
    assert load_job(text, ["dpo={beta: 1}"]).dpo == DPOConfig(beta=1.0)
    assert load_job(text, ["data.train=a=b"]).data.train == "a=b"
    assert load_job(text, ["generation.stop_token_ids=[1,2]"]).generation.stop_token_ids == [1, 2]


def test_overrides_reach_into_free_mappings() -> None:
    text = "actor: {model: {config: {hidden_size: 64, vocab_size: 260}}}"
    job = load_job(text, ["actor.model.config.hidden_size=32", "actor.model.config.new.key=[1, 2]"])
    expected = {"hidden_size": 32, "vocab_size": 260, "new": {"key": [1, 2]}}
    assert job.actor.model.config == expected
    assert load_job(text, ["actor.model.config=null"]).actor.model.config is None


def test_an_error_in_the_file_keeps_its_line_beside_overrides() -> None:
    assert error("seed: 1\ndpo:\n  betta: 1", "dpo.beta=2").startswith("job.yaml:3:")


def test_the_error_of_a_misspelt_key_names_the_right_one() -> None:
    for key in all_keys(JobConfig):
        assert error("", f"{key.name}x=1").endswith(f"is '{key.name}'")


INT64 = st.integers(-(2**63) + 1, 2**63 - 1)


def texts() -> st.SearchStrategy:
    """Text, some of which looks like other types in YAML."""
    tricky = st.sampled_from(
        ["1e-6", "1e6", "yes", "null", "0o7", "12:30", "~", "", " x", "#", "é"]
    )
    return tricky | st.text(st.characters(codec="utf-8", exclude_categories=["C", "Zl", "Zp"]))


def leaves() -> st.SearchStrategy:
    """JSON values that hold no others."""
    numbers = st.floats(allow_nan=False, allow_infinity=False) | st.integers()
    return texts() | numbers | st.booleans() | st.none()


def values(key) -> st.SearchStrategy:
    """Values that a key may hold."""
    finite = st.floats(allow_nan=False, allow_infinity=False)
    if key.is_section:
        kind = jobs(key.type)
    elif key.type is dict:
        anything = leaves() | st.lists(leaves(), max_size=3)
        item = texts() if key.hint == dict[str, str] | None else anything
        kind = st.dictionaries(st.text("abc_", min_size=1), item, max_size=3)
    elif key.type is str:
        kind = st.sampled_from(key.choices) if key.choices else texts()
        if key.is_path:  # no file system has longer names, and a shell expands others
            kind = kind.filter(lambda text: len(text.encode()) <= 255 and text[:1] not in {*"~$"})
    elif key.type is float:
        kind = finite
    elif key.type is list:
        items = {int: INT64, float: finite, str: texts()}[key.items]
        items = st.sampled_from(key.choices) if key.choices else items
        kind = st.lists(items, max_size=3) | (items if key.or_one else st.nothing())
    else:
        kind = st.booleans() if key.type is bool else INT64
    return st.none() | kind if key.optional else kind


def jobs(cls: type) -> st.SearchStrategy:
    """Configs of a class with any values."""
    return st.builds(cls, **{name: values(key) for name, key in section_keys(cls).items()})


@settings(max_examples=15)
@given(jobs(JobConfig))
def test_what_is_dumped_loads_back_equal(job) -> None:
    """Keys that the stage does not read are not dumped; all else comes back."""
    loaded = load_job(dump_job(job))
    assert load_job(dump_job(loaded)) == loaded and dump_job(loaded) == dump_job(job)
    read, back = (
        {key.name: value for key, value in key_values(own) if key.is_read_in(job.stage)}
        for own in (job, loaded)
    )
    assert {k: v for k, v in read.items() if not is_dataclass(v)} == {
        k: v for k, v in back.items() if not is_dataclass(v)
    }


def test_a_shared_mapping_is_written_out_twice() -> None:
    text = "actor: {model: {config: &m {a: 1}}}\nreference: {model: {config: *m}}"
    dumped = dump_job(load_job(text))
    assert "&" not in dumped and load_job(dumped) == load_job(text)


def test_configs_are_found_by_path_and_by_name(tmp_path, monkeypatch) -> None:
    own = tmp_path / "own.yaml"
    own.write_text("seed: 3")
    assert find_config(str(own)) == own
    assert find_config("dpo_tiny") == find_config("dpo_tiny.yaml")
    monkeypatch.chdir(tmp_path)
    assert load_file(find_config("own")).seed == 3
    names = sorted(path.stem for path in find_config("dpo_tiny").parent.glob("*.yaml"))
    line = refusal(lambda: find_config("nope"))
    assert line.startswith("--config nope: no such file in the current folder, ")
    assert line.endswith(f"/configs; give a path, or one of {', '.join(names)}")
    long = f"/{'folder/' * 20}own.yaml"  # whole: cut short it would name no file
    with pytest.raises(ValueError, match=f"--config {long}: no such file in "):
        find_config(long)


def test_a_file_that_cannot_be_read_is_named(tmp_path) -> None:
    path = tmp_path / "latin.yaml"
    path.write_bytes(b"output_dir: \xe9")
    with pytest.raises(ValueError, match=r"latin.yaml: cannot be read as a UTF-8 text"):
        load_file(path)
    path.write_text("seed: 1\nbetta: 2")
    assert refusal(lambda: load_file(path)).startswith(f"{path}:2: unknown key 'betta'; ")


def test_every_key_is_documented() -> None:
    for key in all_keys(JobConfig):
        assert key.doc and len(key.doc) <= 100, key.name
        assert key.type in (bool, int, float, str, dict, list) or key.is_section
        if not key.is_section and key.type in (int, float) and key.default is not None:
            assert math.isfinite(key.default)
        if key.choices and not (key.optional and key.default is None):
            assert key.default in key.choices


@pytest.mark.parametrize(
    ("text", "override", "line"),
    [
        (
            "stage: reward",
            "actor.model.path=/m",
            "override 'actor.model.path=/m': stage reward does not read 'actor.model.path' (of "
            "stage dpo, kto, ppo, grpo); set 'reward.model.path'",
        ),
        (
            "",
            "ppo.kl_coef=0.1",
            "override 'ppo.kl_coef=0.1': stage dpo does not read 'ppo.kl_coef' (of stage ppo, "
            "grpo); leave it out: the loss of this stage is set in 'dpo'",
        ),
        (
            "stage: kto",
            "dpo.beta=0.2",
            "override 'dpo.beta=0.2': stage kto does not read 'dpo.beta' (of stage dpo); set "
            "'kto.beta'",
        ),
        (
            "stage: ppo",
            "data.eval=held_out.jsonl",
            "override 'data.eval=held_out.jsonl': stage ppo does not read 'data.eval' (of stage "
            "dpo, kto, reward); leave it out",
        ),
        (
            "stage: reward",
            "reference.lora=off",
            "override 'reference.lora=off': stage reward does not read 'reference.base' (of stage "
            "dpo, kto, ppo, grpo); leave it out",
        ),
    ],
)
def test_the_error_of_a_key_of_another_stage_names_this_stage_s(text, override, line) -> None:
    assert error(text, override) == line


def test_the_error_of_a_key_of_another_stage_names_its_line() -> None:
    found = error("stage: reward\nactor:\n  model:\n    config: {hidden_size: 8}\n")
    assert found.startswith("job.yaml:4: stage reward does not read 'actor.model.config' (of stage")


@pytest.mark.parametrize("stage", STAGES)
def test_every_key_is_read_or_refused(stage) -> None:
    """Written with its default: what means nothing is an error, what means something is none."""
    for key in all_keys(JobConfig):
        if key.is_section or key.name == "stage":
            continue
        written = f"stage: {stage}", f"{key.name}={json.dumps(key.default)}"
        generates = stage != "reward" and key.generate is True
        if key.is_read_in(stage) or generates:
            load_job(*written[:1], written[1:])
        else:
            assert f"does not read '{key.name}'" in error(*written)


def test_what_is_only_to_generate_with_stands_beside_training() -> None:
    job = load_job("", ["generation.temperature=0.7"])
    assert load_job(dump_job(job)) == job
    assert "does not read 'generation.temperature'" in error(
        "stage: reward", "generation.temperature=0.7"
    )


def test_a_stage_s_defaults_give_way_to_what_is_set() -> None:
    """In the file or an override, in whatever order; other stages have the keys' own."""
    plain, grpo = load_job("stage: ppo"), load_job("stage: grpo")
    assert (plain.ppo.advantage_estimator, plain.generation.num_generations) == ("gae", 1)
    assert (grpo.ppo.advantage_estimator, grpo.generation.num_generations) == ("grpo", 8)
    assert grpo.ppo.use_kl_loss and not grpo.ppo.whiten_advantages
    text = "ppo: {advantage_estimator: rloo}\nstage: grpo\ngeneration: null"
    changed = load_job(text, ["ppo.whiten_advantages=true"])
    assert (changed.ppo.advantage_estimator, changed.ppo.whiten_advantages) == ("rloo", True)
    assert changed.generation.num_generations == 8
    assert load_job(dump_job(changed)) == changed
    with pytest.raises(ValueError, match="ppo: expected a mapping"):
        load_job("stage: grpo\nppo: 3")


def test_a_critic_s_optimizer_is_the_actor_s_but_for_what_is_set() -> None:
    ours = "optimizer: {warmup_steps: 9, weight_decay: 0.1}"
    job = load_job(f"stage: ppo\n{ours}", ["critic.optimizer.lr=1e-5", "optimizer.warmup_steps=7"])
    own = job.critic.optimizer
    assert own is not None and own == replace(job.optimizer, lr=1e-5)
    assert (own.warmup_steps, own.weight_decay, job.optimizer.lr) == (7, 0.1, 1e-6)
    assert load_job(dump_job(job)) == job
    assert load_job(f"stage: ppo\n{ours}").critic.optimizer is None
    empty = load_job(f"stage: ppo\n{ours}", ["critic.optimizer={}"])
    assert empty.critic.optimizer == empty.optimizer
    # A mistake in the actor's is said of the actor's, wherever the critic stands.
    text = "stage: ppo\ncritic: {optimizer: {lr: 1e-5}}\noptimizer: {adam: {learning_rate: 1}}"
    assert error(text).startswith("job.yaml:3: unknown key 'optimizer.adam.learning_rate'; its na")
    assert load_job("critic: {optimizer: {}}\noptimizer: {lr: 1}").optimizer.lr == 1


def test_a_reference_with_adapters_off_is_the_base() -> None:
    for lora in ("off", "false"):
        job = load_job("stage: dpo", [f"reference.lora={lora}"])
        assert (job.reference.base, job.reference.lora) == ("actor", None)
        assert load_job(dump_job(job)) == job
    assert "expected a mapping of keys" in error("stage: dpo", "reference.lora=on")


def test_a_truth_value_is_no_path() -> None:
    assert error("stage: dpo", "checkpoint.resume=true").endswith("expected text, got true")
