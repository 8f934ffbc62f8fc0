"""The command line as a user meets it: output, errors, exit codes."""

import importlib
import re
import subprocess
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import pytest

import puzzle_align
from puzzle_align.cli import inspect
from puzzle_align.cli import main as cli
from puzzle_align.commands import generate, profile
from puzzle_align.commands.summary import say
from puzzle_align.config.job import JobConfig
from puzzle_align.config.load import GENERATE_KEYS, find_config, load_file, load_job
from puzzle_align.config.schema import all_keys
from puzzle_align.layout.plan import divisors
from puzzle_align.runtime.groups import world
from puzzle_align.runtime.liveness import failure
from tests.command import main
from tests.refusals import closed, refusal


@pytest.fixture
def stage(monkeypatch) -> types.SimpleNamespace:
    """Stands in for what commands run, whose calls it records."""
    calls = []

    def record(*arguments: object) -> None:
        calls.append(arguments)

    @contextmanager
    def opened_run(*arguments: object) -> Iterator[tuple[()]]:
        record(*arguments)
        yield ()

    for name in ("stages.run", "commands.validate", "commands.convert"):
        module = types.ModuleType(f"puzzle_align.{name}")
        vars(module).update(opened_run=opened_run, train=lambda: None, validate_job=record)
        vars(module).update(to_hf=record, to_checkpoint=record)
        monkeypatch.setitem(sys.modules, module.__name__, module)
        package, _, last = module.__name__.rpartition(".")
        monkeypatch.setattr(importlib.import_module(package), last, module, raising=False)
    monkeypatch.setattr(world, "shutdown_distributed", lambda: None)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.delenv("RANK", raising=False)
    return types.SimpleNamespace(calls=calls, convert=sys.modules["puzzle_align.commands.convert"])


def help_of(command: str, capsys) -> str:
    with pytest.raises(SystemExit) as stopped:
        main([command, "--help"])
    assert stopped.value.code == 0
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 100
    return shown


def test_help_lists_every_key(capsys) -> None:
    _, listed = help_of("train", capsys).split("config keys, with their defaults:\n")
    assert (
        "optimizer.lr=1e-06\n      peak learning rate (a number; elsewhere learning_rate," in listed
    )
    entries = re.split(r"^  (?=\S)", listed, flags=re.MULTILINE)[1:]
    for key, entry in zip(all_keys(JobConfig), entries, strict=True):
        name, said = re.split("[:=]", entry, maxsplit=1)
        kind = "" if key.is_section else f"({' | '.join(key.choices) or key.unit}"
        assert name == key.name
        assert unspaced(f"{key.doc} {kind}") in unspaced(said)


def unspaced(text: str) -> str:
    """The text without spaces and line breaks, which may stand behind any hyphen."""
    return "".join(text.split())


def test_generate_lists_the_keys_that_it_reads(capsys) -> None:
    shown = help_of("generate", capsys)
    for key in all_keys(JobConfig):
        if not key.is_section:
            read = any(key.name == own or key.name.startswith(f"{own}.") for own in GENERATE_KEYS)
            assert (f"  {key.name}=" in shown) == read, key.name


@pytest.mark.parametrize("override", ["optimizer.lr=1", "data.train=x", "generational=1"])
def test_generate_refuses_what_it_does_not_read(capsys, override) -> None:
    assert main(["generate", "--model", "none", "--prompt", "a", override]) == 2
    shown = capsys.readouterr().err
    assert shown.startswith(f"error: override '{override}': generate does not read")
    assert shown.count("\n") == 1


def test_a_prompt_on_the_command_line_has_no_column(capsys) -> None:
    assert main(["generate", "--model", "none", "--prompt", "a", "--prompt-key", "b"]) == 2
    assert capsys.readouterr().err.startswith("error: --prompt-key: names a column of --prompts;")


def test_help_needs_no_torch() -> None:
    code = (
        "import sys, puzzle_align.cli.main as m\n"
        "for command in ('train', 'generate', 'profile'):\n"
        "    try: m.main([command, '--help'])\n"
        "    except SystemExit: pass\n"
        "assert not {'torch', 'transformers', 'megatron'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_what_only_looks_imports_no_megatron(monkeypatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    commands = (
        "train --config dpo_7b --validate data.num_synthetic=64",
        "train --config kto_tiny --validate data.num_synthetic=64",
        "train --config ppo_tiny --validate",
        "inspect schedule --config reward_tiny data.num_synthetic=64",
        "inspect reshard --config ppo_7b",
    )
    code = (
        "import sys; sys.modules['megatron'] = None  # an import raises ModuleNotFoundError\n"
        "from puzzle_align.cli.main import main\n"
        f"for command in {commands}: main(command.split())"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_a_run_says_that_it_starts_before_anything_slow_is_imported(monkeypatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    code = (
        "import sys; sys.modules['torch'] = None  # an import raises ModuleNotFoundError\n"
        "import puzzle_align.cli.main as m; m.show_log(); m.main(sys.argv[1:])"
    )
    command = [sys.executable, "-c", code, "train", "--config", "dpo_tiny"]
    done = subprocess.run(command, capture_output=True, text=True)
    first, second, *_, last = done.stderr.splitlines()
    assert first == f"puzzle-align {puzzle_align.__version__}: dpo on 1 rank: starting"
    assert second.startswith("Traceback") and "torch" in last


@pytest.mark.slow  # all imports, anew
def test_a_program_that_imports_the_package_shows_its_own_warnings_alone() -> None:
    code = (
        "import puzzle_align.stages.dpo, sys, warnings\n"
        "assert 'megatron.core.optimizer' in sys.modules\n"
        "warnings.warn('Apex is not installed, says the user')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    first, *rest = done.stderr.splitlines()
    assert first == "<string>:3: UserWarning: Apex is not installed, says the user"
    assert all(line.startswith("  warnings.warn(") for line in rest)  # from Python 3.13 on


def test_version(capsys) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["--version"])
    assert stopped.value.code == 0
    assert capsys.readouterr().out == f"puzzle-align {puzzle_align.__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "names"), [([], cli.COMMANDS), (["inspect"], inspect.SUBJECTS)]
)
def test_help_has_a_line_for_every_command(capsys, arguments, names) -> None:
    with pytest.raises(SystemExit):
        main([*arguments, "--help"])
    _, listed = capsys.readouterr().out.split(" is one of:\n")
    lines = [line.split(maxsplit=1) for line in listed.splitlines()]
    assert [name for name, _ in lines] == list(names)
    assert all(len(words.split()) > 3 for _, words in lines)


def test_a_number_of_ranks_is_refused_where_nothing_reads_it(stage, capsys) -> None:
    assert main(["train", "--config", "dpo_tiny", "--world-size", "4"]) == 2
    shown = capsys.readouterr().err
    assert shown.startswith("error: --world-size: only --validate reads it; ")
    assert "--nproc-per-node 4" in shown and shown.count("\n") == 1
    assert stage.calls == []


def test_print_config_prints_what_loads_back(capsys) -> None:
    assert main(["train", "dpo.beta=0.3", "--config", "dpo_tiny", "--print-config", "seed=5"]) == 0
    job = load_job(capsys.readouterr().out)
    assert job == load_file(find_config("dpo_tiny"), ["dpo.beta=0.3", "seed=5"])
    assert (job.dpo.beta, job.seed) == (0.3, 5)


def test_one_of_several_ranks_prints_the_config(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    assert main(["train", "--config", "dpo_tiny", "--print-config"]) == 0
    assert capsys.readouterr().out == ""


def test_keys_that_are_written_as_options_are_told_apart(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        main(["train", "--config", "dpo_tiny", "--learning_rate", "1e-6"])
    told = "unrecognized arguments: --learning_rate; keys are written key=value, such as optim"
    assert told in capsys.readouterr().err


def test_train_runs_the_checked_job(stage) -> None:
    assert main(["train", "--config", "dpo_tiny", "max_steps=3"]) == 0
    assert stage.calls == [(load_file(find_config("dpo_tiny"), ["max_steps=3"]), None)]


def test_an_unsound_job_is_not_run(stage, capsys) -> None:
    assert main(["train", "--config", "dpo_tiny", "max_steps=-2"]) == 2
    assert stage.calls == []
    shown = capsys.readouterr().err
    assert shown.startswith("error: max_steps: -2 is out of range")
    assert shown.count("\n") == 1


@pytest.mark.parametrize(
    ("flags", "environment", "ranks"),
    [([], None, 64), ([], "128", 128), (["--world-size", "96"], "64", 96)],
)
def test_validate_takes_ranks_by_flag_or_launcher(
    stage, monkeypatch, flags, environment, ranks
) -> None:
    if environment:
        monkeypatch.setenv("WORLD_SIZE", environment)
    assert main(["train", "--config", "dpo_70b", "--validate", *flags]) == 0
    assert stage.calls == [(load_file(find_config("dpo_70b")), ranks, None)]


def test_convert_goes_both_ways(stage, monkeypatch) -> None:
    ways = []
    monkeypatch.setattr(
        stage.convert,
        "to_hf",
        lambda *paths, merge: ways.append(("hf", *paths, merge)),
    )
    monkeypatch.setattr(stage.convert, "to_checkpoint", lambda *paths: ways.append(("ck", *paths)))
    for arguments in (
        ["a", "b"],
        ["a", "b", "--role", "critic"],
        ["a", "b", "--merge"],
        ["--to-checkpoint", "c", "d"],
    ):
        assert main(["convert", *arguments]) == 0
    a, b, c, d = map(Path, "abcd")
    assert ways == [
        ("hf", a, b, None, False),
        ("hf", a, b, "critic", False),
        ("hf", a, b, None, True),
        ("ck", c, d),
    ]


def test_other_ranks_leave_the_word_to_rank_0(capsys, monkeypatch) -> None:
    waits = []
    monkeypatch.setattr(cli.time, "sleep", waits.append)
    monkeypatch.setenv("RANK", "3")
    assert main(["train", "--config", "nowhere"]) == 2
    assert waits == [failure.PATIENCE_S]
    assert capsys.readouterr().err.startswith("error on rank 3: --config nowhere")


@pytest.mark.parametrize("debug", [True, False])
@pytest.mark.parametrize("rank", ["0", "1"])
def test_the_line_is_last_and_the_traceback_on_request(
    debug: bool, rank: str, tmp_path: Path, monkeypatch, capsys
) -> None:
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setattr(failure, "SOON_S", 0.0)
    monkeypatch.setattr(failure, "_folder", tmp_path)
    cli.report_mistake(failure.CannotGoOn("f: wrong (a.py:3)", "Traceback\n  here\n"), debug=debug)
    shown, file = capsys.readouterr().err.splitlines(), tmp_path / f"traceback_rank{rank}.txt"
    line = "error: f: wrong (a.py:3)" if rank == "0" else "error on rank 1: f: wrong (a.py:3)"
    if debug:
        assert shown == ["Traceback", "  here", line] and not file.exists()
    else:
        assert shown == [f"{line} (traceback: {file})"]
        assert file.read_text() == "Traceback\n  here\n"
    monkeypatch.setattr(failure, "_folder", None)  # before the job has an output folder
    cli.report_mistake(failure.CannotGoOn("f: wrong", "Traceback"))
    assert capsys.readouterr().err.endswith("f: wrong (--debug shows the traceback)\n")


def test_a_library_s_value_error_keeps_its_traceback(stage, monkeypatch) -> None:
    module = sys.modules["puzzle_align.stages.run"]
    monkeypatch.setattr(module, "train", lambda: "abc".index("x"))
    with pytest.raises(ValueError, match="substring not found"):
        main(["train", "--config", "dpo_tiny"])


@pytest.mark.parametrize("flags", [["fly"], ["train"], ["train", "--config", "x", "--nope"], []])
def test_wrong_usage_exits_with_2(flags) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(flags)
    assert stopped.value.code == 2


def test_lines_that_a_full_disk_does_not_take_are_one_error(stage, tmp_path, monkeypatch) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    shown = ["train", "--config", "dpo_tiny", "--print-config"]
    calls = [shown, ["convert", "--to-checkpoint", "a", "b"], ["report", str(tmp_path)]]
    for call in (partial(say, "a line"), *(partial(cli.main, arguments) for arguments in calls)):
        line = ""
        with (
            suppress(OSError),  # of closing it
            open("/dev/full", "w") as full,
            monkeypatch.context() as patched,
        ):
            patched.setattr(sys, "stdout", full)
            line = refusal(call)
        assert line.startswith("stdout cannot be written (No space left on device)")


def test_an_output_in_a_closed_folder_is_one_line(tmp_path) -> None:
    output = tmp_path / "theirs" / "x.json"
    output.parent.mkdir()
    job = load_file(find_config("dpo_tiny"))
    request = profile.ProfileRequest(output=output, tensor=(), tokens=(), links=None, repeats=1)
    line = f"--output {output}: {output.parent} is not a writable folder; make it, or name another"
    with closed(output.parent):
        assert refusal(partial(profile._checked, job, request)) == line
        assert refusal(partial(generate._check_output, output)) == line


def test_an_error_of_a_function_in_c_is_a_bug() -> None:
    """It has no frame of its own: the last one is this package's, as with a user's mistake."""
    with pytest.raises(ValueError, match="isqrt") as caught:
        divisors(-1)
    assert not cli.is_mistake(caught.value)
    with pytest.raises(ValueError, match="stage") as caught:
        load_job("stage: x\n", [])
    assert cli.is_mistake(caught.value)
