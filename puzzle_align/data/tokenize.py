"""Tokenizers: Hugging Face ones from a directory, and a built-in one of bytes."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Protocol

from puzzle_align.data.records import Message

BYTE_CHAT_TEMPLATE = (
    "{% for m in messages %}"
    "{% set names = {'user': 'Human', 'assistant': 'Assistant'} %}"
    "\n\n{{ names.get(m['role'], m['role'].capitalize()) }}: {{ m['content'] }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}\n\nAssistant:{% endif %}"
)


class Tokenizer(Protocol):
    """What the data pipeline needs of a tokenizer."""

    @property
    def vocab_size(self) -> int:
        """Token ids are below this."""
        ...

    @property
    def bos_ids(self) -> list[int]:
        """What plain text begins with: the BOS token, or nothing."""
        ...

    @property
    def eos_id(self) -> int | None:
        """The end-of-sequence token, where there is one."""
        ...

    @property
    def eos_text(self) -> str:
        """How a chat template writes the end-of-sequence token; '' where it cannot."""
        ...

    @property
    def pad_id(self) -> int:
        """A token for padding; nothing is computed from it."""
        ...

    @property
    def fingerprint(self) -> str:
        """Hash of everything that decides the token ids."""
        ...

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        """Token ids of every text, no special token added."""
        ...

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        """Text of token ids, special tokens left out or written by name.

        Ids that the tokenizer does not know (a model may have more) are left out.
        """
        ...

    def render_chat(
        self,
        messages: list[Message],
        template_kwargs: Mapping[str, Any] | None = None,
        *,
        add_generation_prompt: bool,
    ) -> str:
        """The text of a conversation; ValueError where the chat template rejects it.

        ``template_kwargs``: what else the template is told, such as ``tools``.
        """
        ...


@dataclass(frozen=True)
class ByteTokenizer:
    """UTF-8 bytes are ids 0 to 255; every text starts with a BOS."""

    chat_template: str = BYTE_CHAT_TEMPLATE
    pad_id: int = 256
    bos_id: int = 257
    eos_id: int = 258
    eos_text: str = ""
    vocab_size: int = 259

    @property
    def fingerprint(self) -> str:
        """Hash of the chat template: the ids never change."""
        return hashlib.sha256(f"byte {self.chat_template}".encode()).hexdigest()

    @property
    def bos_ids(self) -> list[int]:
        """Plain text begins with BOS."""
        return [self.bos_id]

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        """Bytes."""
        return [list(text.encode("utf-8")) for text in texts]

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        """Text of the bytes; broken UTF-8 becomes U+FFFD."""
        names = {self.pad_id: b"<pad>", self.bos_id: b"<bos>", self.eos_id: b"<eos>"}
        special = {} if skip_special_tokens else names
        parts = (bytes([i]) if i < 256 else special.get(i, b"") for i in ids)
        return b"".join(parts).decode("utf-8", errors="replace")

    def render_chat(
        self,
        messages: list[Message],
        template_kwargs: Mapping[str, Any] | None = None,
        *,
        add_generation_prompt: bool,
    ) -> str:
        """The chat template's text."""
        from jinja2 import TemplateError

        given = {"chat_template": self.chat_template, **(template_kwargs or {})}
        try:
            template = _compiled(given.pop("chat_template"))
            return template.render(
                **given, messages=messages, add_generation_prompt=add_generation_prompt
            )
        except (TemplateError, TypeError) as error:
            raise ValueError(f"the chat template rejects it ({error})") from None


@lru_cache
def _compiled(chat_template: str) -> Any:
    """A Jinja template; its ``tojson`` leaves ``<`` and the like as they are, as transformers'."""
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment()
    environment.filters["tojson"] = partial(json.dumps, ensure_ascii=False)
    return environment.from_string(chat_template)


class HuggingFaceTokenizer:
    """A tokenizer that ``transformers`` loads from a directory."""

    def __init__(self, path: str, chat_template: str | None) -> None:
        from transformers import AutoTokenizer

        try:
            self._inner: Any = AutoTokenizer.from_pretrained(path, local_files_only=True)
        except (OSError, ValueError, KeyError) as error:
            line = " ".join(str(error).split())
            raise ValueError(
                f"tokenizer.path={path}: no Hugging Face tokenizer there ({line}); "
                "name a directory with tokenizer.json, or 'byte'"
            ) from None
        inner = self._inner
        if chat_template is not None:
            inner.chat_template = chat_template
        self.path = path
        # Ids may have gaps: a token may have one beyond their number.
        self.vocab_size: int = max(len(inner), 1 + max(inner.get_vocab().values(), default=-1))
        self.eos_id: int | None = inner.eos_token_id
        self.eos_text: str = inner.eos_token or ""
        self.pad_id: int = next(
            i for i in (inner.pad_token_id, inner.eos_token_id, 0) if i is not None
        )
        begun = inner("a")["input_ids"][:1]
        self.bos_ids: list[int] = [inner.bos_token_id] if begun == [inner.bos_token_id] else []
        backend = getattr(inner, "backend_tokenizer", None)
        vocabulary = backend.to_str() if backend else sorted(inner.get_vocab().items())
        parts = [type(inner).__name__, vocabulary, inner.chat_template, self.eos_id, self.pad_id]
        self.fingerprint = hashlib.sha256(json.dumps([*parts, self.bos_ids]).encode()).hexdigest()

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        """Token ids without the special tokens that the tokenizer would put around a text."""
        return self._inner(texts, add_special_tokens=False, verbose=False)["input_ids"]

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        """Text of token ids, spaces as the tokens have them."""
        return self._inner.decode(
            ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )

    def render_chat(
        self,
        messages: list[Message],
        template_kwargs: Mapping[str, Any] | None = None,
        *,
        add_generation_prompt: bool,
    ) -> str:
        """The chat template's text."""
        from jinja2 import TemplateError

        given = template_kwargs or {}
        if self._inner.chat_template is None and "chat_template" not in given:
            raise ValueError(f"the tokenizer in {self.path} has no chat template")
        try:
            return self._inner.apply_chat_template(
                messages,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                **given,
            )
        except (TemplateError, TypeError) as error:
            raise ValueError(f"the chat template rejects it ({error})") from None


def load_tokenizer(path: str | None, chat_template: str | None = None) -> Tokenizer:
    """The tokenizer in directory ``path``, or the byte tokenizer for ``None`` and 'byte'.

    ``chat_template`` (Jinja text, or a file of it) replaces the tokenizer's own.
    """
    if chat_template is not None and "{" not in chat_template:
        file = Path(chat_template)
        if not file.is_file():
            raise ValueError(
                f"tokenizer.chat_template={chat_template}: neither Jinja text nor a file of it; "
                "give one of them"
            )
        chat_template = file.read_text(encoding="utf-8")
    if path is None or path == "byte":
        return ByteTokenizer() if chat_template is None else ByteTokenizer(chat_template)
    return HuggingFaceTokenizer(path, chat_template)
