"""Chat templates: transformers' text, no code, and one line for what they reject."""

from datetime import date

import pytest
from transformers import AutoTokenizer

from puzzle_align.data.tokenize import load_tokenizer
from tests.refusals import refusal
from tests.unit.chat_tokenizers import save_llama, save_qwen

ASKED = [{"role": "user", "content": "is it <blue>?\n"}, {"role": "assistant", "content": "é"}]


def rendered(template: str, messages=ASKED, **variables) -> str:
    given = {"chat_template": template, **variables}
    return load_tokenizer("byte").render_chat(messages, given, add_generation_prompt=False)


def refused(template: str, messages=ASKED) -> str:
    line = refusal(lambda: rendered(template, messages))
    assert len(line) < 200
    return line


TEMPLATES = (
    "{% for m in messages %}\n  {% if loop.last %}\n[{{ m.role }}]\n  {% endif %}\n{% endfor %}",
    "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}\n{% endfor %}",
    "{{ messages | tojson(indent=1) }}{{ tools | tojson }}{{ {'é': '<'} | tojson }}",
    "{{ dict(a=1) }}{{ bos_token }}|{{ pad_token }}|{{ tools is none }}",
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


def test_tokens_depend_on_no_day() -> None:
    assert rendered("{{ strftime_now('%d %b %Y, %H:%M') }}") == "26 Jul 2024, 00:00"


@pytest.mark.parametrize(
    ("template", "line"),
    [
        ("{{ 1/0 }}", "rejects it (ZeroDivisionError: division by zero)"),
        ("{{ range(10**9)|list }}", "rejects it (OverflowError: Range too big"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "rejects it (RecursionError"),
        ("{{ ''.__class__.__mro__ }}", "rejects it (access to attribute '__class__'"),
        ("{{ cycler.__init__.__globals__ }}", "rejects it (access to attribute '__init__'"),
        ("{{ namespace(__class__=1) }}", "rejects it (Chat templates cannot store underscore"),
        ("{% set ns = namespace() %}{% set ns.__class__ = 1 %}", "rejects it (Chat templates can"),
        ("{{ self.__init__.__globals__ }}", "rejects it (access to attribute '__init__'"),
        ("{{ (messages|map(attribute='__class__')|list)[0].x }}", "rejects it (access to attr"),
        ("{{ strftime_now.__globals__.x }}", "rejects it (access to attribute '__glob"),
        ("{% import 'os' as os %}", "rejects it (TypeError: no loader"),
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


def test_values_that_are_not_json_reach_no_template(tmp_path) -> None:
    """Dates and paths of columnar files become text that names their type."""
    given = {"x": date(2026, 1, 1), "y": tmp_path}
    assert rendered("{{ x }} {{ y }} {{ x.year }}", **given) == "<date> <PosixPath> "


@pytest.mark.parametrize(
    ("variables", "line"),
    [
        ({"tools": ["look"]}, "Tools should either be a JSON schema, or a"),
        ({"documents": [1]}, "Documents should be a list of dicts"),
    ],
)
def test_variables_that_no_template_takes_are_one_line(variables, line) -> None:
    assert line in refusal(lambda: rendered("{{ x }}", **variables))
