"""Chat templates put together at random, harmless and not; a text is transformers' text."""

import random
import re
from pathlib import Path

from puzzle_align.data.tokenize import load_tokenizer
from tests.fuzz.harness import Case
from tests.unit.chat_tokenizers import LLAMA, QWEN

_MESSAGES = (
    [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "<b>é</b>\n"}],
    [{"role": "system", "content": ""}, {"role": "user", "content": "x" * 2000, "name": None}],
    [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "thinking": "so"}],
    [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image"}]}],
)
_VARIABLES = (
    {},
    {"tools": [{"name": "look", "n": 1.5}]},
    {"documents": []},
    {"x": {"y": [1, None]}},
)
_ATOMS = (
    "messages[0]",
    "messages[0].content",
    "messages[-1]['role']",
    "messages",
    "tools",
    "bos_token",
    "x",
    "x.y",
    "nothing",
    "nothing.more",
    "loop.index",
    "loop.last",
    "m",
    "m.content",
    "ns.x",
    "true",
    "none",
    "0",
    "3",
    "-1",
    "1.5",
    "10**3",
    "99999",
    "'a'",
    "'\\n'",
    "'<|im_start|>'",
    "[]",
    "[1, 2]",
    "{'a': 1}",
    "range(3)",
    "dict(a=1)",
    "f()",
    "cycler('a', 'b')",
    "self",
    "''.__class__",
    "messages.__class__.__mro__",
    "messages.append",
    "namespace",
    "lipsum",
)
_OPERATORS = (
    "+",
    "-",
    "*",
    "/",
    "//",
    "%",
    "~",
    "==",
    "<",
    "in",
    "and",
    "or",
    "is",
    "not in",
    "[",
    "(",
)
_FILTERS = (
    "tojson",
    "tojson(indent=2)",
    "trim",
    "length",
    "list",
    "join",
    "join(', ')",
    "upper",
    "replace('a', 'bb')",
    "default('d')",
    "first",
    "last",
    "sort",
    "map(attribute='content')",
    "selectattr('role', 'equalto', 'user')",
    "reject",
    "int",
    "string",
    "safe",
    "escape",
    "indent",
    "items",
    "batch(2)",
    "sum",
    "unique",
    "xmlattr",
    "nofilter",
    "format(1)",
    "attr('__class__')",
    "center(9)",
    "round",
    "reverse",
    "dictsort",
)
_HOSTILE = (
    "{{ 1/0 }}",
    "{{ range(10**9)|list }}",
    "{{ 'a' * 10**10 }}",
    "{{ [1] * 10**10 }}",
    "{{ 'a'|center(10**10) }}",
    "{{ '%9999999999d' % 1 }}",
    "{{ '{:9999999999}'.format(1) }}",
    "{{ 'a'.ljust(10**10) }}",
    "{{ ('a' * 10**6).replace('', 'b' * 10**6) }}",
    "{{ ''|tojson(indent=10**10) }}{{ [1]|tojson(indent=10**10) }}",
    "{% macro g(n) %}{{ g(n) }}{% endmacro %}{{ g(1) }}",
    "{% for i in range(99999) %}{% for j in range(99999) %}xxxx{% endfor %}{% endfor %}",
    "{% set n = namespace(x='a') %}{% for i in range(99) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    "{% set n = namespace(x='a') %}{% for i in range(99) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "{% for m in messages recursive %}{{ loop(messages) }}{% endfor %}",
    "{{ strftime_now('%99999999999Y') }}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ cycler.__init__.__globals__.os.system('touch mark') }}",
    "{{ self.__init__.__globals__ }}",
    "{{ raise_exception('no') }}",
    "{% include 'x' %}",
    "{% import 'os' as os %}",
    "{% extends '/etc/passwd' %}",
    "{{ namespace(__class__=1) }}",
    "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
    "{{ '\\0' }}",
    "{{ " + "(" * 500 + "1" + ")" * 500 + " }}",
    "{{ " + "-" * 5000 + "1 }}",
    "{% if 1 %}" * 300,
    "{{ " + "9" * 5000 + " }}",
    "{{ 10 ** 5000 }}",
)
_ENDLESS = (
    "{{ 10**(10**9) }}",
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{% macro g(n) %}{% if n %}{{ g(n-1) }}{{ g(n-1) }}{% endif %}{% endmacro %}{{ g(90) }}",
    "{{ lipsum(n=10**7) }}",
)
_WRITTEN = (QWEN, LLAMA)


class Kind:
    """See ``harness.Kind``."""

    limit_s = 15.0  # a second of the processor's, and what others take
    imports = ("transformers.utils.chat_template_utils",)

    def __init__(self, folder: Path) -> None:
        load_tokenizer("byte", "{{ 1 }}").render_chat(_MESSAGES[0], add_generation_prompt=True)

    def case(self, draw: random.Random) -> Case:
        """A template, a conversation and variables."""
        kind = draw.random()
        if kind < 0.002:
            template = draw.choice(_ENDLESS)
        elif kind < 0.1:
            template = draw.choice(_HOSTILE) + _block(draw, 1)
        elif kind < 0.3:
            text = draw.choice(_WRITTEN)
            at, cut = draw.randrange(len(text)), draw.choice((0, 1, 5))
            template = text[:at] + draw.choice(("", "{", "%}", "x", "'")) + text[at + cut :]
        else:
            template = "".join(_block(draw, 3) for _ in range(draw.randrange(1, 4)))
        messages, own = draw.choice(_MESSAGES), draw.choice(_VARIABLES)
        prompts = draw.random() < 0.5
        given = {"chat_template": template, **own}

        def use() -> str:
            tokenizer = load_tokenizer("byte")
            return tokenizer.render_chat(messages, given, add_generation_prompt=prompts)

        def wrong(text: str) -> str | None:
            return _wrong(text, template, messages, {**own, "add_generation_prompt": prompts})

        return Case(repr(template[:300]), use, wrong)


def _wrong(text: str, template: str, messages: list, variables: dict) -> str | None:
    """How transformers writes the conversation otherwise."""
    from transformers.utils.chat_template_utils import render_jinja_template

    given = [{k: v for k, v in message.items() if v is not None} for message in messages]
    try:
        (wanted,), _ = render_jinja_template([given], chat_template=template, **variables)
    except Exception as error:  # noqa: BLE001 - ours should have raised it
        return f"{text[:200]!r}, and transformers raises {type(error).__name__}: {error}"
    # Another address, another draw, a class by another name; filters may have gone over them.
    plain = "".join(c for c in wanted.lower() if c.isalnum()).replace("bb", "a")
    if "at0x" in plain or re.search(r"lipsum|namespace(?! *\()", template):
        return None
    return None if text == wanted else f"{text[:200]!r}, not {wanted[:200]!r}"


def _block(draw: random.Random, depth: int) -> str:
    kind = draw.randrange(12 if depth else 3)
    if kind == 0:
        return draw.choice(("text\n", "\n  ", "<|im_start|>", "{# note #}\n", "é", "{{ '{{' }}"))
    if kind < 5:
        return "{{ " + _value(draw, 2) + " }}"
    inner = _block(draw, depth - 1) + _block(draw, depth - 1)
    value = _value(draw, 1)
    return draw.choice(
        (
            f"{{% for m in {value} %}}{inner}{{% else %}}none{{% endfor %}}\n",
            f"{{%- for m in messages -%}}\n{inner}\n{{%- endfor -%}}",
            f"{{% for m in messages if {value} %}}{inner}{{% break %}}{{% endfor %}}",
            f"{{% if {value} %}}\n{inner}\n  {{% endif %}}\n",
            f"{{% set x = {value} %}}{inner}",
            f"{{% set ns = namespace(x={value}) %}}{{% set ns.x = {value} %}}{inner}",
            f"{{% generation %}}{inner}{{% endgeneration %}}\n",
            f"{{% macro f(a=1) %}}{inner}{{% endmacro %}}",
            f"{{% filter upper %}}{inner}{{% endfilter %}}",
            f"{{% set y %}}{inner}{{% endset %}}{{{{ y }}}}",
            f"{{% call f() %}}{inner}{{% endcall %}}",
            f"{{% raw %}}{inner}{{% endraw %}}",
        )
    )


def _value(draw: random.Random, depth: int) -> str:
    kind = draw.random()
    if not depth or kind < 0.4:
        return draw.choice(_ATOMS)
    if kind < 0.7:
        return f"{_value(draw, depth - 1)}|{draw.choice(_FILTERS)}"
    if kind < 0.8:
        return f"({_value(draw, depth - 1)} if {_value(draw, depth - 1)} else 1)"
    return f"{_value(draw, depth - 1)} {draw.choice(_OPERATORS)} {_value(draw, depth - 1)}"
