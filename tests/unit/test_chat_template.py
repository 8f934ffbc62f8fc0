"""Chat templates: transformers' text, and whatever they do, one line in bounded time."""

import multiprocessing
import os
import re
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from transformers import AutoTokenizer

from puzzle_align.data import chat_template
from puzzle_align.data.chat_template import CannotRender, TemplateStopped, _Process, rendering
from puzzle_align.data.tokenize import load_tokenizer
from tests.unit.chat_tokenizers import save_llama, save_qwen

ASKED = [{"role": "user", "content": "is it <blue>?\n"}, {"role": "assistant", "content": "é"}]


def rendered(template: str, messages=ASKED, **variables) -> str:
    given = {"chat_template": template, **variables}
    return load_tokenizer("byte").render_chat(messages, given, add_generation_prompt=False)


def refused(template: str, messages=ASKED) -> str:
    with pytest.raises(ValueError) as raised:
        rendered(template, messages)
    line = str(raised.value)
    assert len(line) < 200 and len(line.splitlines()) == 1
    return line


TEMPLATES = (
    "{% for m in messages %}\n  {% if loop.last %}\n[{{ m.role }}]\n  {% endif %}\n{% endfor %}",
    "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}\n{% endfor %}",
    "{{ messages | tojson(indent=1) }}{{ tools | tojson }}{{ {'é': '<'} | tojson }}",
    "{{ strftime_now('%Y') }}{{ dict(a=1) }}{{ bos_token }}|{{ pad_token }}|{{ tools is none }}",
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}"
    "{% if ns.n > 1 %}{% break %}{% endif %}{% endfor %}{{ ns.n }}",
    "{% for m in messages %}{{ m.reasoning_content }}{{ m.thinking }}{{ m.tool_calls }}"
    "{% endfor %}",
)


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_text_is_transformers(template, tmp_path) -> None:
    messages = [*ASKED, {"role": "assistant", "content": "b", "thinking": "so", "tool_calls": None}]
    for save in (save_qwen, save_llama):
        path = save(tmp_path / save.__name__)
        theirs = AutoTokenizer.from_pretrained(path)
        ours = load_tokenizer(path, template)
        wanted = theirs.apply_chat_template(messages, chat_template=template, tokenize=False)
        assert ours.render_chat(messages, add_generation_prompt=False) == wanted


def test_a_prompt_and_its_responses_are_told_one_time() -> None:
    first, second = (rendered("{{ strftime_now('%H:%M:%S.%f') }}") for _ in range(2))
    assert first == second


@pytest.mark.parametrize(
    ("template", "line"),
    [
        ("{{ 1/0 }}", "rejects it (ZeroDivisionError: division by zero)"),
        ("{{ range(10**9)|list }}", "rejects it (OverflowError: Range too big"),
        ("{{ 'a' * 10**10 }}", "writes too much text, or needs too much memory"),
        ("{{ 'a'|center(10**10) }}", "writes too much text, or needs too much memory"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "rejects it (RecursionError"),
        ("{{ ''.__class__.__mro__ }}", "rejects it (access to attribute '__class__'"),
        ("{{ cycler.__init__.__globals__ }}", "rejects it (access to attribute '__init__'"),
        ("{{ namespace(__class__=1) }}", "rejects it (a namespace takes no name"),
        ("{{ messages.append(1) }}", "rejects it (access to attribute 'append'"),
        ("{% include 'x' %}", "rejects it (TypeError: no loader"),
        ("{{ x|nothing }}", "rejects it (No filter named 'nothing'.)"),
        ("{% if %}", "rejects it (Expected an expression"),
        ("{{ raise_exception('no\nmore') }}", "rejects it (no more)"),
        ("{{ '\ud800' }}\n{{ 1/0 }}", "rejects it (ZeroDivisionError"),
    ],
)
def test_what_a_template_may_not_is_one_line(template, line) -> None:
    assert refused(template).startswith(f"the chat template {line}")


ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"


def test_what_has_no_end_is_stopped_and_condemns_no_other() -> None:
    template = f"{{% if messages[0].content == 'x' %}}{ENDLESS}{{% endif %}}fine"
    bad = [{"role": "user", "content": "x"}]
    for _ in range(3):
        used = time.process_time()
        line = "the chat template was stopped: for one conversation it takes more than 1 s"
        assert refused(template, bad) == line
        assert time.process_time() - used < 1  # the time is another process's
        assert rendered(template) == "fine"  # the process is there again


_PROGRAM = """
import os, signal, struct, sys
from pathlib import Path
before = len(list(Path(__file__).parent.glob("started*")))
(Path(__file__).parent / f"started{before}").touch()
START
sys.stdout.buffer.write(b"o")
sys.stdout.buffer.flush()
(length,) = struct.unpack("<q", sys.stdin.buffer.read(8))
sys.stdin.buffer.read(length)
ASKED
sys.stdout.buffer.write(struct.pack("<q", 3) + b"ook")
sys.stdout.buffer.flush()
"""


@pytest.mark.parametrize(
    ("start", "asked", "kind", "line", "num_started"),
    [
        ("os._exit(3)", "", CannotRender, "does not start (it ended with code 3): see that", 1),
        ("", "os.kill(os.getpid(), 9)", CannotRender, "was ended by SIGKILL, twice, as the", 2),
        (
            "",
            "os.kill(os.getpid(), 11)",
            TemplateStopped,
            "its process was ended by SIGSEGV, twice",
            2,
        ),
        ("", "os._exit(1)", TemplateStopped, "its process ended with code 1, twice", 2),
        ("", "os.kill(os.getpid(), signal.SIGPROF)", TemplateStopped, "more than 1 s", 1),
        ("", "os._exit(1) if not before else None", None, "ok", 2),
        ("", "signal.pause()", CannotRender, "gave no answer in 0 s, twice: the machine is", 2),
        ("signal.pause()", "", CannotRender, "does not start (it gives no sign of life in 0 s)", 1),
    ],
)
def test_what_has_ended_the_process_is_told(
    tmp_path, monkeypatch, start, asked, kind, line, num_started
) -> None:
    if "pause" in start + asked:
        monkeypatch.setattr(chat_template, "_PATIENCE_S", 0.0 if start else 0.4)
    program = tmp_path / "program.py"
    program.write_text(_PROGRAM.replace("START", start).replace("ASKED", asked))
    process = _Process(str(program))
    if kind is None:
        assert process.render(b"request") == line
    else:
        with pytest.raises(kind, match=re.escape(line)):
            process.render(b"request")
    process.stop()
    assert len(list(tmp_path.glob("started*"))) == num_started or start == "signal.pause()"


def test_no_process_to_be_had_is_one_line_of_no_record(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "none"))
    with pytest.raises(CannotRender, match=r"does not start \(No such file or directory\)"):
        _Process().render(b"request")
    process = _Process()
    monkeypatch.setattr(chat_template, "_process", process)
    with pytest.raises(CannotRender), rendering("file:1"):
        rendered("fine")


def test_a_long_conversation_has_its_room() -> None:
    messages = [{"role": "user", "content": "é" * 2**23}]
    assert (
        len(rendered("{{ messages[0].content }}{{ messages[0].content|trim }}", messages)) == 2**24
    )
    assert "too much text" in refused("{{ messages[0].content * 9 }}" * 9, messages)


@pytest.mark.parametrize(
    ("messages", "variables", "line"),
    [
        ([], {}, "the conversation has no message"),
        (ASKED, {"tokenize": True}, "chat_template_kwargs: tokenize is no variable of a template"),
        (ASKED, {"tools": "look"}, "tools must be a list of mappings, not look"),
        (ASKED, {"documents": [1]}, r"documents must be a list of mappings, not \[1\]"),
        (ASKED, {"x": 2**99_999}, None),
    ],
)
def test_what_cannot_be_given_to_a_template(messages, variables, line) -> None:
    if line is None:
        assert rendered("fine", messages, **variables) == "fine"
        return
    with pytest.raises(ValueError, match=line):
        rendered("{{ x }}", messages, **variables)


def test_values_nested_too_deep_are_one_line() -> None:
    deep: list = []
    for _ in range(5000):
        deep = [deep]
    with pytest.raises(ValueError, match="cannot be given to a template"):
        rendered("fine", ASKED, x=deep)


def _render_many(first: int) -> list[str]:
    return [rendered("{{ x }}", x=number) for number in range(first, first + 50)]


def test_threads_and_forked_processes_get_their_own_answers() -> None:
    wanted = [[str(number) for number in range(first, first + 50)] for first in (0, 100, 200)]
    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(_render_many, (0, 100, 200))) == wanted
    with multiprocessing.get_context("fork").Pool(3) as pool:
        assert pool.map(_render_many, (0, 100, 200)) == wanted
    assert rendered("{{ x }}", x=os.getpid()) == str(os.getpid())
