"""Tokenizers, the prompt/response boundary and truncation."""

import json
from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from puzzle_align.config.sections.data import AddEos
from puzzle_align.data.errors import DataError, TooLong
from puzzle_align.data.pairs import Limits, example_tokens, render, separate, truncate
from puzzle_align.data.records import Record
from puzzle_align.data.tokenize import ByteTokenizer, load_tokenizer
from tests.refusals import refusal

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
VOCABULARY = ["a", "b", "c", "d", "ab", "cd", "<s>", "</s>", "<pad>", "<|im_start|>", "<|im_end|>"]


def tokenize(record: Record, tokenizer, add_eos: AddEos = "auto"):
    rendered = render(record, tokenizer)
    ids = tokenizer.encode_batch([rendered.prompt, *rendered.wholes])
    ids = [array("i", own) for own in ids]
    prompt, responses = separate(rendered, ids, tokenizer, add_eos=add_eos)
    return list(prompt), [list(response) for response in responses]


def tokens(prompt, responses) -> list[list[str]]:
    """Tokens of ``save_bpe``, by name."""
    return [[VOCABULARY[i] for i in ids] for ids in (prompt, *responses)]


def chat(*prompt: tuple[str, str], responses: tuple[str, str] = ("A", "B")) -> Record:
    """Turns of a role and a text each, and two answers."""
    turns = [{"role": role, "content": text} for role, text in prompt]
    answers = tuple([{"role": "assistant", "content": text}] for text in responses)
    return Record(turns, answers, "f:1")


def save_bpe(path, *, bos: bool = False, eos: str = "</s>", template: str | None = None) -> str:
    """A BPE tokenizer of two merges, in a directory as models come with."""
    vocabulary = {token: i for i, token in enumerate([*VOCABULARY, "<unk>"])}
    bpe = models.BPE(vocab=vocabulary, merges=[("a", "b"), ("c", "d")], unk_token="<unk>")
    backend = Tokenizer(bpe)
    backend.add_special_tokens(["<s>", "</s>", "<pad>", "<|im_start|>", "<|im_end|>"])
    if bos:
        backend.post_processor = processors.TemplateProcessing(
            single="<s> $A </s>", special_tokens=[("<s>", 6), ("</s>", 7)]
        )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token=eos, pad_token="<pad>"
    )
    tokenizer.chat_template = template
    tokenizer.save_pretrained(path)
    return str(path)


def test_the_fingerprint_of_a_tokenizer_in_python_is_of_all_its_files(tmp_path):
    words = {"a</w>": 0, "b": 1, "<unk>": 2, "b</w>": 3, "ab</w>": 4, "a": 5}
    (tmp_path / "vocab.json").write_text(json.dumps(words))
    (tmp_path / "merges.txt").write_text("#version\na b</w>\n")
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "CTRLTokenizer"}')
    one, same = (load_tokenizer(str(tmp_path)) for _ in range(2))
    (tmp_path / "merges.txt").write_text("#version\n")
    other = load_tokenizer(str(tmp_path))
    assert one.encode_batch(["ab a"]) != other.encode_batch(["ab a"])
    assert one.fingerprint == same.fingerprint != other.fingerprint


def test_a_merge_across_the_boundary_belongs_to_the_response(tmp_path):
    tokenizer = load_tokenizer(save_bpe(tmp_path))
    # 'dca' ends in 'a'; with the response 'b', chosen or rejected, the text is d, c, ab.
    prompt, merged, alone = ["d", "c"], ["ab", "</s>"], ["a", "c", "</s>"]
    found = tokens(*tokenize(Record("dca", ("b", "c"), "f:1"), tokenizer))
    assert found == [prompt, merged, alone]
    found = tokens(*tokenize(Record("dca", ("c", "b"), "f:1"), tokenizer))
    assert found == [prompt, alone, merged]
    assert tokens(*tokenize(Record("dca", ("c", "d"), "f:1"), tokenizer)) == [
        ["d", "c", "a"],
        ["c", "</s>"],
        ["d", "</s>"],
    ]


def test_a_prompt_that_merges_away_has_no_token(tmp_path):
    tokenizer = load_tokenizer(save_bpe(tmp_path))
    record = Record("a", ("b", "c"), "f:8")  # without EOS nothing would predict its one token
    assert tokens(*tokenize(record, tokenizer)) == [[], ["ab", "</s>"], ["a", "c", "</s>"]]
    caught = refusal(lambda: tokenize(record, tokenizer, add_eos=False), DataError)
    assert caught == (
        "f:8: a response has no token to predict; fill it in, or end all responses "
        "with a token: tokenizer.add_eos=true"
    )


def test_bos_stands_where_the_tokenizer_puts_one_and_eos_once(tmp_path):
    tokenizer = load_tokenizer(save_bpe(tmp_path, bos=True))
    assert tokenizer.bos_ids == [6]
    prompt, responses = tokenize(Record("a", ("b", "c</s>"), "f:1"), tokenizer)
    assert (prompt, responses) == ([6], [[4, 7], [0, 2, 7]])
    prompt, responses = tokenize(Record("a", ("b", "c"), "f:1"), tokenizer, add_eos=False)
    assert (prompt, responses) == ([6], [[4], [0, 2]])


@pytest.mark.parametrize("text", ["dc", "<s>dc"])
def test_a_bos_that_the_prompt_writes_out_is_not_doubled(tmp_path, text):
    tokenizer = load_tokenizer(save_bpe(tmp_path, bos=True))
    prompt, responses = tokenize(Record(text, ("a", "b</s>"), "f:1"), tokenizer)
    assert (prompt, responses) == ([6, 3, 2], [[0, 7], [1, 7]])


def test_a_prompt_written_by_a_chat_template_gets_no_second_bos(tmp_path):
    template = "{{ bos_token }}" + CHATML
    tokenizer = load_tokenizer(save_bpe(tmp_path, bos=True, template=template))
    record = chat(("a", "a"), responses=("b", "cd"))
    text = render(record, tokenizer).prompt
    prompt, _ = tokenize(Record(text, ("b", "cd"), "f:1"), tokenizer)
    chat_prompt, _ = tokenize(record, tokenizer)
    assert prompt == chat_prompt and prompt[:2] == [6, 9]


def test_chat_template_of_a_hugging_face_tokenizer(tmp_path):
    path = save_bpe(tmp_path, bos=True, eos="<|im_end|>", template=CHATML)
    tokenizer = load_tokenizer(path)
    record = chat(("a", "a"), responses=("b", "cd"))
    rendered = render(record, tokenizer)
    assert rendered.prompt == "<|im_start|>a\na<|im_end|>\n<|im_start|>assistant\n"
    assert rendered.wholes[1] == rendered.prompt + "cd<|im_end|>\n"
    prompt, responses = tokenize(record, tokenizer)
    assert prompt[0] == 9  # the template writes the special tokens: no BOS
    end = [10, VOCABULARY.index("<|im_end|>") + 1]  # <|im_end|> and the template's newline, no EOS
    assert responses == [[1, *end], [5, *end]]
    assert tokenize(record, tokenizer, add_eos=True)[1] == responses  # the template has ended them
    other = load_tokenizer(save_bpe(tmp_path / "other", template=CHATML))
    assert tokenize(record, other)[1] == responses
    assert tokenize(record, other, add_eos=True)[1] == [[*ids, 7] for ids in responses]


def test_fingerprint_and_decode(tmp_path):
    one = load_tokenizer(save_bpe(tmp_path / "a"))
    same = load_tokenizer(save_bpe(tmp_path / "b"))
    other = load_tokenizer(save_bpe(tmp_path / "c", bos=True))
    assert one.fingerprint == same.fingerprint != other.fingerprint
    assert load_tokenizer(str(tmp_path / "a"), CHATML).fingerprint != one.fingerprint
    file = tmp_path / "a" / "tokenizer_config.json"  # which tells the chat template of <s>
    file.write_text(json.dumps({**json.loads(file.read_text()), "bos_token": "<|im_start|>"}))
    assert load_tokenizer(str(tmp_path / "a")).fingerprint != one.fingerprint
    file = tmp_path / "b" / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "split_special_tokens": True}))
    assert load_tokenizer(str(tmp_path / "b")).fingerprint != one.fingerprint
    assert (one.vocab_size, one.eos_id, one.pad_id) == (12, 7, 8)
    assert one.decode([4, 7]) == "ab" and one.decode([4, 7], skip_special_tokens=False) == "ab </s>"
    byte = load_tokenizer("byte")
    assert byte.decode(byte.encode_batch(["é!"])[0] + [byte.pad_id]) == "é!"
    assert byte.decode([97, 258, 300], skip_special_tokens=False) == "a<eos>"
    assert byte.fingerprint == ByteTokenizer().fingerprint != ByteTokenizer("x").fingerprint


def test_ids_are_below_the_vocabulary_size_with_gaps_too(tmp_path):
    backend = Tokenizer(models.WordLevel({"a": 0, "b": 7, "<unk>": 3}, unk_token="<unk>"))
    PreTrainedTokenizerFast(tokenizer_object=backend).save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')  # the model's, beside it
    tokenizer = load_tokenizer(str(tmp_path))
    assert tokenizer.encode_batch(["b"]) == [[7]] and tokenizer.vocab_size == 8


def test_tokenizer_errors(tmp_path):
    caught = refusal(lambda: load_tokenizer(str(tmp_path / "none")))
    assert "no Hugging Face tokenizer there" in caught
    (tmp_path / "config.json").write_text('{"tokenizer_class": "pipeline"}')
    caught = refusal(lambda: load_tokenizer(str(tmp_path)))  # there is no tokenizer_config.json
    assert "config.json: tokenizer_class=pipeline is not a tokenizer class" in caught
    with pytest.raises(ValueError, match="neither Jinja text nor a file of it"):
        load_tokenizer(None, "none.jinja")
    chat = Record([{"role": "user", "content": "a"}], ([], []), "f:2")
    caught = refusal(lambda: render(chat, load_tokenizer(save_bpe(tmp_path / "t"))), DataError)
    assert caught == (
        f"f:2: the tokenizer in {tmp_path}/t has no chat template; "
        "correct the messages, or set tokenizer.chat_template"
    )
    picky = load_tokenizer("byte", "{{ raise_exception('no') }}")
    with pytest.raises(DataError, match="f:2: the chat template rejects it"):
        render(chat, picky)


@pytest.mark.parametrize(
    ("name", "was", "now", "line"),
    [
        ("tokenizer.json", '"a": 0', '"a": 1', "two of its tokens have the same id"),
        ("tokenizer.json", '"dropout": null', '"dropout": 0.5', "model.dropout=0.5 makes tok"),
        ("tokenizer.json", '"a": 0', '"a": -1', "no Hugging Face tokenizer there"),
        ("tokenizer.json", "{", "", "no Hugging Face tokenizer there"),
        ("tokenizer_config.json", '"eos_token": "</s>"', '"eos_token": 7', "tokenizer there"),
        ("tokenizer_config.json", '"tokenizer_class": "', '"tokenizer_class": "Auto', "is not a"),
        ("tokenizer_config.json", '"tokenizer_class"', '"tokenizer_class": 7, "x"', "=7 is no"),
    ],
)
def test_a_damaged_tokenizer_is_one_line(tmp_path, name, was, now, line):
    path = save_bpe(tmp_path)
    file = tmp_path / name
    assert was in file.read_text()
    file.write_text(file.read_text().replace(was, now, 1))
    message = refusal(lambda: load_tokenizer(path))
    assert message.startswith(f"tokenizer.path={path}: ") and line in message


def test_chat_template_from_a_file(tmp_path):
    file = tmp_path / "chat.jinja"
    file.write_text("{% for m in messages %}[{{ m['content'] }}]{% endfor %}")
    tokenizer = load_tokenizer(None, str(file))
    messages = [{"role": "user", "content": "a"}]
    assert tokenizer.render_chat(messages, add_generation_prompt=True) == "[a]"


def test_byte_tokenizer_with_its_own_chat_template():
    tokenizer = load_tokenizer(None)
    record = chat(("system", "s"), ("user", "u"))
    prompt, responses = tokenize(record, tokenizer)
    assert tokenizer.decode(prompt) == "\n\nSystem: s\n\nHuman: u\n\nAssistant:"
    # no template can write its end-of-sequence token
    assert responses == [[*b" A", 258], [*b" B", 258]]
    assert tokenize(record, tokenizer, add_eos=False)[1] == [[*b" A"], [*b" B"]]


def test_a_prompt_may_end_with_an_assistants_turn():
    tokenizer = load_tokenizer(None, CHATML)
    record = chat(("user", "u"), ("assistant", "so"))
    begun = "assistant\nso<|im_end|>\n<|im_start|>assistant\n"
    assert render(record, tokenizer).prompt.endswith(begun)
    assert tokenize(record, tokenizer)[0][-len(begun) :] == list(begun.encode())


P, Y = list(range(10)), [[20, 21, 22, 23], [30, 31]]


@pytest.mark.parametrize(
    ("limits", "prompt", "responses"),
    [
        (Limits(14), P, Y),
        (Limits(12), P[2:], Y),
        (Limits(12, None, "keep_start"), P, [[20, 21], [30, 31]]),
        (Limits(11, None, "keep_start"), P, [[20], [30]]),
        # half of 6 stays of the prompt, then responses lose their ends
        (Limits(6), P[7:], [[20, 21, 22], [30, 31]]),
        (Limits(14, 4), P[6:], Y),
        (Limits(14, 4, "keep_start"), P[:4], Y),
        # the prompt keeps its max_prompt_length: the responses give way
        (Limits(7, 5), P[5:], [[20, 21], [30, 31]]),
        (Limits(5, 8), P[6:], [[20], [30]]),
        (Limits(2), P[9:], [[20], [30]]),
    ],
)
def test_truncation_by_hand(limits, prompt, responses):
    pair = P, Y
    kept = truncate(pair, limits, "f:1")
    assert kept == (prompt, responses)
    assert (kept is pair) == (kept == pair)


@given(
    st.integers(1, 12),
    st.lists(st.integers(1, 12), min_size=1, max_size=3),
    st.integers(2, 20),
    st.none() | st.integers(1, 20),
    st.sampled_from(["keep_end", "keep_start"]),
)
@settings(max_examples=300)
def test_truncation_never_empties_and_never_exceeds(prompt, responses, longest, cap, mode):
    pair = list(range(prompt)), [list(range(100, 100 + size)) for size in responses]
    limits = Limits(longest, cap, mode)
    if mode == "keep_start" and min(prompt, cap or prompt) >= longest:
        with pytest.raises(TooLong):
            truncate(pair, limits, "f:1")
        return
    kept, answers = truncate(pair, limits, "f:1")
    assert kept and all(answers)
    assert len(kept) + max(map(len, answers)) <= longest
    assert cap is None or len(kept) <= cap
    assert kept == (pair[0][-len(kept) :] if mode == "keep_end" else pair[0][: len(kept)])
    assert all(whole[: len(part)] == part for whole, part in zip(pair[1], answers, strict=True))
    if mode == "keep_start":
        assert len(kept) == min(prompt, cap or prompt)


def test_truncation_mode_error() -> None:
    assert refusal(lambda: truncate((P, Y), Limits(13, None, "error"), "f:4"), DataError) == (
        "f:4: 10 prompt and 4 response tokens are over data.max_length=13; "
        "raise it or set data.truncation_mode to keep_end"
    )
    with pytest.raises(DataError, match="over data.max_prompt_length=9"):
        truncate((P, Y), Limits(99, 9, "error"), "f:4")


@pytest.mark.parametrize(
    ("limits", "is_dropped"),
    [
        (Limits(14, None, "drop"), False),
        (Limits(13, None, "drop"), True),
        (Limits(14, 10, "drop"), False),
        (Limits(99, 9, "drop"), True),
        (Limits(10, None, "keep_start"), True),
        (Limits(10, 9, "keep_start"), False),
    ],
)
def test_pairs_that_are_left_out(limits, is_dropped):
    if is_dropped:
        with pytest.raises(TooLong, match="f:4: 10 prompt and 4 response tokens are over data.max"):
            truncate((P, Y), limits, "f:4")
    else:
        truncate((P, Y), limits, "f:4")


def test_row_tokens_of_one_pair():
    sizes = {
        ("shared", True): 16,
        ("paired", True): 26,
        ("shared", False): 16,
        ("paired", False): 32,
    }
    for (layout, packed), size in sizes.items():
        assert example_tokens((P, Y), layout, packed=packed) == size


def test_a_trained_bpe_tokenizer_round_trips(tmp_path):
    from tokenizers import decoders, trainers

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(["the sky is blue", "the sea is green", "the sun"] * 9, trainer)
    PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>"
    ).save_pretrained(tmp_path)
    tokenizer = load_tokenizer(str(tmp_path))
    assert tokenizer.bos_ids == [] and tokenizer.pad_id == tokenizer.eos_id
    prompt, responses = tokenize(Record("the s", ("ky is blue", "un ⛅"), "f:1"), tokenizer)
    assert tokenizer.decode(prompt + responses[0]) == "the sky is blue"
    assert tokenizer.decode(prompt + responses[1]) == "the sun ⛅"
    assert [response[-1] for response in responses] == [tokenizer.eos_id] * 2
