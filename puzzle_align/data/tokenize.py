"""Tokenizers: Hugging Face ones from a directory, and a built-in byte tokenizer.

Chat templates are programs shipped with models. transformers runs them in Jinja's immutable
sandbox, as ``apply_chat_template`` does: they reach no attribute that could run code.
"""

import hashlib
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

from puzzle_align.data.errors import DataError
from puzzle_align.data.records import Message
from puzzle_align.files.checksums import FileSum
from puzzle_align.files.messages import shown
from puzzle_align.files.typed import either, list_of, table, whole

# The time that all templates see, which Llama's have without a clock: tokens depend on no day, so
# that a resumed run, another node and a later evaluation have the same.
_CLOCK = datetime(2024, 7, 26)
_MOST_TOKENS = 2**24
_TOKEN_ID = whole(0, _MOST_TOKENS)
_GENERATION = table({"eos_token_id": either(_TOKEN_ID, list_of(_TOKEN_ID))})
_CLASS_NAME = re.compile(r"(?!Auto)\w*(Tokenizer|TokenizerFast|Backend)")

BYTE_CHAT_TEMPLATE = (
    "{% for m in messages %}"
    "{% set names = {'user': 'Human', 'assistant': 'Assistant'} %}"
    "{{ '\\n\\n' ~ names.get(m['role'], m['role'].capitalize()) }}: {{ m['content'] }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '\\n\\nAssistant:' }}{% endif %}"
)


class Tokenizer(ABC):
    """Interface of tokenizers."""

    path: str = "byte"  # its directory
    vocab_size: int  # token ids are below this
    bos_ids: list[int]  # first tokens of plain text: the BOS token, or none
    eos_id: int | None  # the end-of-sequence token, if any
    eos_text: str  # its text in chat templates; '' if they cannot write it
    pad_id: int  # fills rows; no result depends on it
    fingerprint: str  # hash of everything that decides the token ids

    @abstractmethod
    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        """Token ids of every text, without special tokens around it."""

    @abstractmethod
    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        """Text of token ids; special tokens are left out or written by name.

        Unknown ids (a model may have more than its tokenizer) are left out.
        """

    @abstractmethod
    def _template(self, name: str | None, tools: Any) -> tuple[str, Mapping[str, str]]:
        """The chat template of that name (None: the usual one), and special tokens by name."""

    def render_chat(
        self,
        messages: list[Message],
        template_kwargs: Mapping[str, Any] | None = None,
        *,
        add_generation_prompt: bool,
    ) -> str:
        """The text of a conversation, as transformers renders it.

        ``template_kwargs`` are more variables of the template, such as ``tools``. One-line
        ValueError if the template is invalid or rejects the conversation.
        """
        from transformers.utils import chat_template_utils

        given = dict(template_kwargs or {})
        template, special = self._template(given.pop("chat_template", None), given.get("tools"))
        conversation = [
            {name: value for name, value in message.items() if value is not None}
            for message in messages
        ]
        try:
            # transformers compiles a template once.
            compiled = chat_template_utils._compile_jinja_template(template)
            compiled.environment.globals["strftime_now"] = lambda form: _CLOCK.strftime(form)
            (text,), _ = chat_template_utils.render_jinja_template(
                [conversation],
                chat_template=template,
                add_generation_prompt=add_generation_prompt,
                **{**special, **given},
            )
        except Exception as error:  # noqa: BLE001 - a template may raise anything
            is_intended = any(base.__name__ == "TemplateError" for base in type(error).__mro__)
            name = "" if is_intended else f"{type(error).__name__}: "
            raise ValueError(f"the chat template rejects it ({shown(f'{name}{error}')})") from None
        return text


class ByteTokenizer(Tokenizer):
    """UTF-8 bytes are ids 0 to 255; every text starts with a BOS."""

    def __init__(self, chat_template: str | None = None) -> None:
        chat_template = self.chat_template = chat_template or BYTE_CHAT_TEMPLATE
        self.pad_id, bos_id, self.eos_id = 256, 257, 258
        self.bos_ids, self.eos_text, self.vocab_size = [bos_id], "", 259
        self.fingerprint = hashlib.sha256(f"byte {chat_template}".encode()).hexdigest()
        self._names = {self.pad_id: b"<pad>", bos_id: b"<bos>", self.eos_id: b"<eos>"}

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        """UTF-8 bytes of every text."""
        return [list(text.encode("utf-8")) for text in texts]

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        """Text of the bytes; broken UTF-8 becomes U+FFFD."""
        special = {} if skip_special_tokens else self._names
        parts = (bytes([i]) if i < 256 else special.get(i, b"") for i in ids)
        return b"".join(parts).decode("utf-8", errors="replace")

    def _template(self, name: str | None, tools: Any) -> tuple[str, Mapping[str, str]]:
        return name or self.chat_template, {}

    def save(self, folder: Path) -> None:
        """Write it as a Hugging Face tokenizer with the same ids; it needs no code of ours."""
        from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
        from transformers import PreTrainedTokenizerFast
        from transformers.convert_slow_tokenizer import bytes_to_unicode

        letters = bytes_to_unicode()
        inner = Tokenizer(models.BPE({letters[byte]: byte for byte in range(256)}, []))
        inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        inner.decoder = decoders.ByteLevel()
        pad, bos, eos = names = [name.decode() for name in self._names.values()]
        inner.add_special_tokens([AddedToken(name, special=True) for name in names])
        begun = [(bos, self.bos_ids[0])]
        inner.post_processor = processors.TemplateProcessing(f"{bos} $A", special_tokens=begun)
        saved = PreTrainedTokenizerFast(
            tokenizer_object=inner, pad_token=pad, bos_token=bos, eos_token=eos
        )
        saved.chat_template = self.chat_template
        saved.save_pretrained(folder)


class HuggingFaceTokenizer(Tokenizer):
    """A tokenizer that ``transformers`` loads from a directory, without running code in it.

    Any error of transformers is a one-line ValueError that names the directory.
    """

    def __init__(self, path: str, chat_template: str | None) -> None:
        from transformers import AutoTokenizer

        self.path = path
        _check_classes(path)
        with self._foreign("no Hugging Face tokenizer there"):
            self._inner: Any = AutoTokenizer.from_pretrained(
                path, local_files_only=True, trust_remote_code=False
            )
        inner = self._inner
        if chat_template is not None:
            inner.chat_template = chat_template
        with self._foreign("it cannot be used"):
            ids = inner.get_vocab().values()
            if len(set(ids)) < len(ids):  # chance would decide which token is decoded
                raise ValueError("two of its tokens have the same id")
            model = getattr(getattr(inner, "backend_tokenizer", None), "model", None)
            if dropout := getattr(model, "dropout", None):
                raise ValueError(
                    f"its model.dropout={dropout:g} makes tokenization random: set it to null"
                )
            # Ids may have gaps, so the largest may exceed their number.
            self.vocab_size = max(len(inner), 1 + max(ids, default=-1))
            if not 0 < self.vocab_size <= _MOST_TOKENS:  # a mistyped id
                raise ValueError(f"it has ids up to {self.vocab_size - 1}")
            self.eos_id = self._special("eos_token")
            self.eos_text = inner.eos_token or ""
            pad_ids = (self._special("pad_token"), self.eos_id, 0)
            self.pad_id = next(i for i in pad_ids if i is not None)
            bos_id, begun = self._special("bos_token"), inner("a")["input_ids"][:1]
            self.bos_ids = [bos_id] if bos_id is not None and begun == [bos_id] else []
            self.fingerprint = self._hash()

    def _special(self, name: str) -> int | None:
        """The id of a special token, if any."""
        token, token_id = getattr(self._inner, name), getattr(self._inner, f"{name}_id")
        if token is None:
            return None
        # A token outside the vocabulary has no id, or the unknown token's.
        if token_id is None or self._inner.convert_ids_to_tokens(token_id) != str(token):
            raise ValueError(f"its {name} '{token}' is not in its vocabulary")
        return token_id

    def _hash(self) -> str:
        inner = self._inner
        backend = getattr(inner, "backend_tokenizer", None)
        vocabulary = backend.to_str() if backend else self._files()
        special = sorted((name, str(token)) for name, token in inner.special_tokens_map.items())
        parts = [type(inner).__name__, vocabulary, inner.chat_template, self.eos_id, self.pad_id]
        parts += [self.bos_ids, special]
        if inner.split_special_tokens:
            parts.append("split_special_tokens")
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()

    def _files(self) -> list[Any]:
        """Vocabulary and file checksums, which decide the ids of a tokenizer written in Python."""
        names = {*self._inner.vocab_files_names.values(), "tokenizer_config.json"}
        paths = [Path(self.path) / name for name in sorted(names)]
        sums = [(path.name, FileSum.of(path).xxh3_64) for path in paths if path.is_file()]
        return [sorted(self._inner.get_vocab().items()), sums]

    @contextmanager
    def _foreign(self, what: str) -> Iterator[None]:
        """Raise any exception inside as a one-line ValueError."""
        try:
            yield
        except (KeyboardInterrupt, GeneratorExit):
            raise
        except BaseException as error:  # noqa: BLE001 - Rust's panics are no Exception
            why = shown(str(error) or type(error).__name__)
            raise ValueError(
                f"tokenizer.path={self.path}: {what} ({why}); name a directory with "
                "tokenizer.json, or 'byte'"
            ) from None

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        """Token ids of every text, without special tokens around it."""
        with self._foreign("it cannot be used"):
            return self._inner(texts, add_special_tokens=False, verbose=False)["input_ids"]

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        """Text of token ids; spaces are not cleaned up."""
        with self._foreign("it cannot be used"):
            return self._inner.decode(
                ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
            )

    def _template(self, name: str | None, tools: Any) -> tuple[str, Mapping[str, str]]:
        if self._inner.chat_template is None and name is None:
            raise ValueError(f"the tokenizer in {self.path} has no chat template")
        with self._foreign("it has no such chat template"):
            template = self._inner.get_chat_template(name, tools)
        return template, self._inner.special_tokens_map


@contextmanager
def rendering(origin: str) -> Iterator[None]:
    """Raise a ValueError of ``render_chat`` as a DataError of the record at ``origin``."""
    try:
        yield
    except ValueError as error:
        cure = "correct the messages, or set tokenizer.chat_template"
        raise DataError(origin, "chat template", str(error), cure) from None


def _check_classes(path: str) -> None:
    """Raise a one-line ValueError if a file names a class that is not a tokenizer's.

    transformers loads any of its classes by name, and offers to run the code of unknown ones.
    """
    for name in ("tokenizer_config.json", "config.json"):
        try:
            values = json.loads((Path(path) / name).read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            continue  # transformers reports the file's error
        cls = values.get("tokenizer_class") if isinstance(values, dict) else None
        if cls is not None and not (isinstance(cls, str) and _CLASS_NAME.fullmatch(cls)):
            raise ValueError(
                f"tokenizer.path={path}: {name}: tokenizer_class={shown(cls)} is not a "
                "tokenizer class; save the tokenizer again"
            )


def generation_stops(folder: str | None) -> list[int]:
    """Tokens that end a response by a directory's ``generation_config.json``, if it has one.

    ValueError, one line, if it cannot be read.
    """
    file = Path(folder or "") / "generation_config.json"
    if folder is None or not file.is_file():
        return []
    try:
        eos = _GENERATION.read(json.loads(file.read_bytes()), str(file)).get("eos_token_id")
    except (OSError, RecursionError, json.JSONDecodeError) as error:
        raise ValueError(f"{file}: cannot be read ({shown(str(error))}); write it again") from None
    return [] if eos is None else [eos] if isinstance(eos, int) else eos


def load_tokenizer(path: str | None, chat_template: str | None = None) -> Tokenizer:
    """The tokenizer in directory ``path``, or the byte tokenizer for ``None`` and 'byte'.

    ``chat_template`` (Jinja text, or a file of it) replaces the tokenizer's.
    """
    if chat_template is not None:
        chat_template = template_text(chat_template)
    if path is None or path == "byte":
        return ByteTokenizer(chat_template)
    return HuggingFaceTokenizer(path, chat_template)


def template_text(name: str) -> str:
    """Jinja text, or the content of a file of it; a one-line ValueError if that fails."""
    if "{" in name:
        return name
    try:
        return Path(name).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise ValueError(
            f"tokenizer.chat_template={shown(name)}: neither Jinja text nor a file of it "
            f"({shown(str(why))}); give one of them"
        ) from None
