"""Tokenizers' directories with damaged files, and with code that nobody asked for."""

import json
import random
import shutil
from pathlib import Path
from typing import Any

from puzzle_align.data.tokenize import Tokenizer, load_tokenizer
from tests.fuzz.harness import Case
from tests.fuzz.mutate import damaged_bytes
from tests.fuzz.values import changed_json
from tests.unit.chat_tokenizers import LLAMA

_TEXTS = ["ab cd", "<s>a</s> dab", "", "é\n"]
_CHAT = [{"role": "user", "content": "ab"}]
_CODE = "from pathlib import Path\nPath({mark!r}).touch()\nclass Own:\n    pass\n"
_CRAFTED: tuple[dict[str, Any], ...] = (
    {"auto_map": {"AutoTokenizer": ["own.Own", None]}},
    {"auto_map": {"AutoTokenizer": ["own.Own", "own.Own"]}, "tokenizer_class": "Own"},
    {"auto_map": ["own.Own", None]},
    {"auto_map": {"AutoTokenizer": "own.Own"}, "tokenizer_class": "AutoTokenizer"},
    {"auto_map": {"AutoModel": "own.Own"}, "tokenizer_class": "AutoModel"},
    {"tokenizer_class": "pipeline"},
    {"tokenizer_class": "own.Own"},
    {"tokenizer_class": "../own"},
)


class Kind:
    limit_s = 10
    imports = ("transformers",)

    def __init__(self, folder: Path) -> None:
        from tests.unit.test_tokenize import save_bpe

        self.good = Path(save_bpe(folder / "good", bos=True, template=LLAMA))
        self.mark = folder / "mark"
        special = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
        (self.good / "special_tokens_map.json").write_text(json.dumps(special))
        (self.good / "added_tokens.json").write_text(json.dumps({"<s>": 6, "</s>": 7, "<pad>": 8}))
        (self.good / "config.json").write_text(json.dumps({"model_type": "llama"}))
        (self.good / "own.py").write_text(_CODE.format(mark=str(self.mark)))
        self.path = folder / "case"
        self.texts = {path.name: path.read_bytes() for path in sorted(self.good.iterdir())}
        load_tokenizer(str(self.good)).render_chat(_CHAT, add_generation_prompt=True)

    def case(self, draw: random.Random) -> Case:
        shutil.rmtree(self.path, ignore_errors=True)
        shutil.copytree(self.good, self.path)
        what = self._damage(draw)
        return Case(what, lambda: _use(str(self.path)), _wrong, self.mark)

    def _damage(self, draw: random.Random) -> str:
        kind = draw.random()
        if kind < 0.15:
            own = draw.choice(_CRAFTED)
            for name in draw.choice((("tokenizer_config.json",), ("config.json",), self.texts)):
                if name.endswith("config.json"):
                    found = {**json.loads(self.texts[name]), **own}
                    (self.path / name).write_text(json.dumps(found))
            if draw.random() < 0.3:
                (self.path / "tokenizer.json").unlink()
            return f"crafted: {own}"
        name = draw.choice([*self.texts, "tokenizer.json", "tokenizer_config.json"])
        if kind < 0.2:
            (self.path / name).unlink()
            return f"{name} taken away"
        if kind < 0.4 or not name.endswith(".json"):
            what, data = damaged_bytes(draw, self.texts[name])
            (self.path / name).write_bytes(data)
        else:
            what, text = changed_json(draw, json.loads(self.texts[name]))
            (self.path / name).write_text(text)
        return f"{name}: {what}"


def _use(path: str) -> tuple[str, Tokenizer, list[list[int]], list[str]]:
    tokenizer = load_tokenizer(path)
    ids = tokenizer.encode_batch(_TEXTS)
    texts = [tokenizer.decode(own, skip_special_tokens=False) for own in ids]
    try:
        tokenizer.render_chat(_CHAT, add_generation_prompt=True)
    except ValueError as error:
        assert len(str(error)) < 600, error
    return path, tokenizer, ids, texts


def _wrong(result: tuple[str, Tokenizer, list[list[int]], list[str]]) -> str | None:
    """Difference from transformers' own tokenizer, or a token that cannot be one."""
    from transformers import AutoTokenizer

    path, tokenizer, ids, texts = result
    own = AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    wanted = [own(text, add_special_tokens=False)["input_ids"] for text in _TEXTS]
    if ids != wanted:
        return f"tokens {ids}, not {wanted}"
    if texts != [own.decode(one, clean_up_tokenization_spaces=False) for one in wanted]:
        return f"texts {texts}"
    if any(not 0 <= token < tokenizer.vocab_size for one in ids for token in one):
        return f"tokens {ids} of {tokenizer.vocab_size}"
    for name, token in (("eos_token", tokenizer.eos_id), ("pad_token", tokenizer.pad_id)):
        there = getattr(own, name)
        if there is not None and own.convert_ids_to_tokens(token) != there:
            return f"{name} {there} is {token}"
    return None
