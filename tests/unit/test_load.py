"""Configs: what is wrong is said where it stands; what is right comes back equal."""

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from puzzle_align.config.job import JobConfig
from puzzle_align.config.load import dump_job, find_config, load_file, load_job
from puzzle_align.config.schema import all_keys, section_keys
from puzzle_align.config.sections.models import ParallelConfig
from puzzle_align.config.sections.optimizer import OptimizerConfig
from puzzle_align.config.sections.preference import DPOConfig


def error(text: str, *overrides: str) -> str:
    """The one line that a wrong config gives."""
    with pytest.raises(ValueError) as raised:
        load_job(text, overrides, source="job.yaml")
    message = str(raised.value)
    assert "\n" not in message
    return message


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
        ("<<: {seed: 1}", "job.yaml:1: '<<' cannot be read"),
        ("seed: 1\nseed: 2", "job.yaml:2: 'seed' is given twice"),
        ("actor: {model: {config: {a: 1,\n a: 2}}}", "job.yaml:2: 'actor.model.config.a' is given"),
        ("\nseed: true", "job.yaml:2: seed: expected an integer, got true"),
        ("seed: 1.0", "job.yaml:1: seed: expected an integer, got 1.0"),
        ("dpo: {beta: true}", "dpo.beta: expected a finite number, got true"),
        ("dpo: {beta: .nan}", "dpo.beta: expected a finite number, got nan"),
        ("dpo: {beta: [1]}", "dpo.beta: expected a finite number, got a list"),
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
            "expected a list of integers, got a list of oth",
        ),
        (
            "generation: {stop_token_ids: [true]}",
            "expected a list of integers, got a list of oth",
        ),
        ("dpo: {loss_type: [sigmoid, sigmod]}", "loss_type: 'sigmod' is not .* did you mean sigmo"),
        ("dpo: {loss_type: [1]}", "loss_type: expected text or a list of texts, got a list of oth"),
        ("dpo: {loss_weights: 2}", r"expected a list of numbers, got 2; write '\[2\]'$"),
        ("dpo: {loss_weights: [1, a]}", "loss_weights: expected a finite number, got 'a'"),
        (
            "actor: {parallel: {pipeline_layers: automatic}}",
            "pipeline_layers: expected a list of integers or auto, got 'automatic'$",
        ),
        ("- seed", "job.yaml:1: a config is a mapping"),
        ("seed: 1\ndpo: {", "job.yaml:2: not valid YAML"),
        ("seed: 1\n---\nseed: 2", "job.yaml:2: not valid YAML"),
        ("seed: \x00", "job.yaml:1: not valid YAML"),
        ("? [a]\n: 1", "job.yaml:1: a mapping or list cannot be a key"),
        ("seed: !!python/object:os.system 1", "job.yaml:1: '1' cannot be read"),
        ("seed: 2024-13-45", "job.yaml:1: '2024-13-45' cannot be read"),
    ],
)
def test_one_line_says_where_and_what(text, message) -> None:
    with pytest.raises(ValueError, match=message):
        load_job(text, source="job.yaml")
    error(text)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("dpo.betta=1", "override 'dpo.betta=1': unknown key 'dpo.betta'; .* 'dpo.beta'$"),
        ("actr.model.path=x", "override 'actr.model.path=x': unknown key 'actr'"),
        ("dpo.beta=x", "override 'dpo.beta=x': dpo.beta: expected a finite number, got 'x'"),
        ("dpo.beta=", "override 'dpo.beta=': dpo.beta: null is not a value"),
        ("dpo.beta={", "override 'dpo.beta={': not valid YAML"),
        ("dpo.beta", "override 'dpo.beta': write it as key=value"),
        ("=1", "override '=1': write it as key=value"),
        ("seed.x=1", "override 'seed.x=1': 'seed' is a value, not a section with 'x'"),
        ("packing.layout.x=1", "override 'packing.layout.x=1': packing.layout: expected text"),
        ("dpo={betta: 1}", "override 'dpo={betta: 1}': unknown key 'dpo.betta'"),
        ("actor.parallel.recompute=x", "override 'actor.parallel.recompute=x': actor.parallel.rec"),
    ],
)
def test_a_wrong_override_names_itself(override, message) -> None:
    with pytest.raises(ValueError, match=message):
        load_job("seed: 1\ndpo: {beta: 0.2}", [override])


def test_a_word_may_stand_for_a_list() -> None:
    for written, expected in (
        ("auto", ParallelConfig(pipeline_layers="auto")),
        ("[3, 2]", ParallelConfig(pipeline_layers=[3, 2])),
        ("null", ParallelConfig()),
    ):
        job = load_job("", [f"actor.parallel.pipeline_layers={written}"])
        assert job.actor.parallel == expected
        assert load_job(dump_job(job)) == job


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


def test_every_misspelt_key_is_told_the_right_one() -> None:
    for key in all_keys(JobConfig):
        assert error("", f"{key.name}x=1").endswith(f"is '{key.name}'")


def texts() -> st.SearchStrategy:
    """Text, some of which looks like other types in YAML."""
    tricky = st.sampled_from(
        ["1e-6", "1e6", "yes", "null", "0o7", "12:30", "~", "", " x", "#", "é"]
    )
    return tricky | st.text(st.characters(codec="utf-8", exclude_categories=["C"]))


def leaves() -> st.SearchStrategy:
    """JSON values that hold no others."""
    numbers = st.floats(allow_nan=False, allow_infinity=False) | st.integers()
    return texts() | numbers | st.booleans() | st.none()


def values(key) -> st.SearchStrategy:
    """What a key may hold."""
    if key.is_section:
        kind = jobs(key.type)
    elif key.type is dict:
        kind = st.dictionaries(
            st.text("abc_", min_size=1), leaves() | st.lists(leaves(), max_size=3), max_size=3
        )
    elif key.type is str:
        kind = st.sampled_from(key.choices) if key.choices else texts()
    elif key.type is list:
        kind = st.nothing()
    else:
        kind = plain(key.type)
    if key.items is not None:
        item = st.sampled_from(key.choices) if key.choices else plain(key.items)
        kind |= st.lists(item, max_size=3)
    return st.none() | kind if key.optional else kind


def plain(kind: type) -> st.SearchStrategy:
    """Values of a type that holds no others."""
    if kind is float:
        return st.floats(allow_nan=False, allow_infinity=False)
    return {bool: st.booleans(), int: st.integers(), str: texts()}[kind]


def jobs(cls: type) -> st.SearchStrategy:
    """Configs of a class with any values."""
    return st.builds(cls, **{name: values(key) for name, key in section_keys(cls).items()})


@settings(max_examples=40, deadline=None)
@given(jobs(JobConfig))
def test_what_is_dumped_loads_back_equal(job) -> None:
    assert load_job(dump_job(job)) == job


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
    with pytest.raises(ValueError, match=r"--config nope: no such file in .*configs.*dpo_tiny"):
        find_config("nope")


def test_a_file_that_cannot_be_read_is_named(tmp_path) -> None:
    path = tmp_path / "latin.yaml"
    path.write_bytes(b"output_dir: \xe9")
    with pytest.raises(ValueError, match=r"latin.yaml: cannot be read as a UTF-8 text"):
        load_file(path)


def test_every_key_is_documented() -> None:
    for key in all_keys(JobConfig):
        assert key.doc and len(key.doc) <= 100, key.name
        assert key.type in (bool, int, float, str, dict, list) or key.is_section
        if not key.is_section and key.type in (int, float) and key.default is not None:
            assert math.isfinite(key.default)
        if key.choices:
            assert key.default in key.choices
