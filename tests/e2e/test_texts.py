"""Lines about the data's texts: cut responses, tokens that the model lacks, resuming."""

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
import transformers
from transformers import AutoTokenizer

from tests.bounds import LOGIT_BOUND, LOSS_BOUND
from tests.checkpoints import change_job
from tests.e2e.conftest import Command
from tests.metrics import records
from tests.specs import hf_llama
from tests.unit.chat_tokenizers import save_qwen

ROLES = {"dpo": "actor", "reward": "reward", "ppo": "actor"}
NEW = "<|new|>"  # the tokenizer has it, the model does not
WARNED = "data with a token that it lacks is an error"


def _messages(role: str, text: str) -> list[dict[str, str]]:
    return [{"role": role, "content": text}]


def _chat(prompt: str, chosen: str, **more: object) -> dict[str, object]:
    answers = {"chosen": _messages("assistant", chosen), "rejected": _messages("assistant", "no")}
    return {"prompt": _messages("user", prompt), **answers, **more}


def _write(path: Path, *rows: Mapping[str, object]) -> str:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return str(path)


def _job(stage: str, folder: Path, *rows: Mapping[str, object]) -> list[str]:
    role = ROLES[stage]
    return [
        *("--config", f"{stage}_tiny", f"output_dir={folder}/out", "data.format=auto"),
        f"data.train={_write(folder / 'data.jsonl', *rows)}",
        *(() if stage == "ppo" else ("data.eval_fraction=0", "telemetry.eval_every=0")),
        *("global_batch_size=4", "max_steps=2", f"{role}.model.random_weights=true"),
        "tokenizer.path=byte",
        *(f"{role}.model.config.{name}=32" for name in ("hidden_size", "intermediate_size")),
        f"{role}.model.config.num_hidden_layers=1",
    ]


CUT = (
    "data: 2 of 5 pairs have a cut response, whose last token is not its end: the model learns to "
    "score it there; raise data.max_length, or leave such pairs out with data.truncation_mode=drop"
)
LONG = [{"prompt": "p:", "chosen": "a" * n, "rejected": "b"} for n in (3, 30, 4, 40, 5)]


def test_cut_responses_of_a_reward_model_are_reported(
    tmp_path: Path, train, caplog: pytest.LogCaptureFixture
) -> None:
    job = [*_job("reward", tmp_path, *LONG), "data.max_length=24"]
    code, shown, _ = train(*job, "--validate")
    assert code == 0
    place = shown.index("data: 5 pairs, 2 of them truncated (2 with a cut response)")
    assert shown[place + 1] == f"warning: {CUT}"
    code, _, errors = train(*job)
    assert code == 0 and CUT in caplog.messages

    job = [*job, "data.truncation_mode=drop", f"output_dir={tmp_path}/dropped", "max_steps=1"]
    code, shown, _ = train(*job, "--validate", "global_batch_size=3")
    assert code == 0
    assert "data: 3 pairs, 0 of them truncated; dropped 2 that are too long" in shown
    assert not [line for line in shown if "cut response" in line]

    code, _, errors = train(*job, "--validate", "data.max_length=4")
    assert code == 2
    (line,) = [line for line in errors if line.startswith("error: ")]
    assert "no usable pairs" in line and "1 prompt" not in line


def test_a_policy_may_learn_of_cut_responses_without_a_warning(tmp_path: Path, train) -> None:
    job = [*_job("dpo", tmp_path, *LONG), "data.max_length=24"]
    code, shown, _ = train(*job, "--validate")
    assert code == 0
    assert "data: 5 pairs, 2 of them truncated (2 with a cut response)" in shown
    assert not [line for line in shown if line.startswith("warning: data")]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, int]:
    """Folder of a tokenizer, and how many tokens a model has that lacks its last one."""
    path = save_qwen(tmp_path_factory.mktemp("tokenizer"))
    inner = AutoTokenizer.from_pretrained(path)
    inner.add_tokens([NEW])
    inner.save_pretrained(path)
    return path, len(inner) - 1


@pytest.mark.parametrize("stage", ROLES)
def test_a_larger_tokenizer_goes_with_data_that_has_none_of_its_last_tokens(
    stage: str, tmp_path: Path, train, tokenizer: tuple[str, int]
) -> None:
    path, size = tokenizer
    rows = [_chat(f"what is {number}?", "blue") for number in range(8)]
    key = f"{ROLES[stage]}.model"
    more = [f"tokenizer.path={path}", f"{key}.config.vocab_size={size}", "data.max_length=256"]
    code, shown, errors = train("--validate", *_job(stage, tmp_path, *rows), *more)
    assert (code, errors) == (0, [])
    warning = (
        f"tokenizer.path: the tokenizer has {size + 1} tokens, the vocab_size of {key} is {size}: "
        "data with a token that it lacks is an error"
    )
    assert shown.count(f"warning: {warning}") == 1

    rows[5] = _chat(f"the sky {NEW} blue", "blue")
    code, _, errors = train("--validate", *_job(stage, tmp_path, *rows), *more)
    assert code == 2
    (line,) = [line for line in errors if line.startswith("error: ")]
    assert line == (
        f"error: tokenizer.path: token {size} ('{NEW}') of the record that begins "
        f"'<|im_start|>user\\nthe sky {NEW} blue<|i' is not below {size}, the vocab_size of "
        f"{key}: give the model's own tokenizer, or leave such records out"
    )


def test_generation_warns_of_a_larger_tokenizer_and_stops_at_its_tokens(
    tmp_path: Path, command: Command, tokenizer: tuple[str, int], caplog: pytest.LogCaptureFixture
) -> None:
    path, size = tokenizer
    _model(tmp_path / "model", size, 0)
    tools = [{"type": "function", "function": {"name": "look"}}]
    row = {"prompt": _messages("user", "what is the sky?"), "tools": json.dumps(tools)}
    arguments = [
        *("generate", "--model", f"{tmp_path}/model", f"tokenizer.path={path}"),
        *("engine.device=cpu", "generation.max_new_tokens=2"),
    ]
    source = _write(tmp_path / "a.jsonl", row)
    code, shown, errors = command(*arguments, "--prompts", source)
    assert code == 0, errors
    assert sum(WARNED in line for line in caplog.messages) == 1
    (line,) = map(json.loads, shown)
    assert {name: line[name] for name in row} == row  # as the file has them
    code, _, errors = command(*arguments, "--prompt", f"a {NEW}")
    assert code == 2 and any(f"token {size} ('{NEW}') of the record" in line for line in errors)


def test_a_run_on_other_tokens_is_not_gone_on_with(tmp_path: Path, train, tokenizer) -> None:
    path, size = tokenizer
    rows = [_chat(f"what is {number}?", "the sky is blue " * number) for number in range(8)]
    more = [f"tokenizer.path={path}", f"actor.model.config.vocab_size={size + 1}"]
    more += ["data.max_length=200", "packing.row_tokens=512", "checkpoint.save_every=1"]
    for steps in (1, 2):
        code, _, errors = train(*_job("dpo", tmp_path, *rows), *more, f"max_steps={steps}")
        assert code == 0, errors
    rows[0]["tools"] = "[{}]"
    for validated in ((), ("--validate",)):
        code, _, errors = train(*_job("dpo", tmp_path, *rows), *more, "max_steps=3", *validated)
        assert code == 2
        (line,) = (line for line in errors if "was trained on other data" in line)
        assert "(data.*, tokenizer.*): restore it, or start anew" in line  # no key was changed


def test_responses_of_a_run_that_is_gone_on_with_end_at_the_same_tokens(
    tmp_path: Path, train, tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    """A base model's tokenizer and its chat model's often differ in the end token alone."""
    path, size = tokenizer
    other, prompts = tmp_path / "other", tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"count {n}"}) + "\n" for n in range(8)))
    inner = AutoTokenizer.from_pretrained(path)
    ends = inner.eos_token_id, inner.convert_tokens_to_ids("<|im_start|>")
    inner.eos_token = "<|im_start|>"
    inner.save_pretrained(other)
    job = [*("--config", "grpo_tiny", f"data.train={prompts}", f"output_dir={tmp_path}/run")]
    job += ["data.format=auto", "actor.model.random_weights=true", "telemetry.progress=false"]
    job += [f"actor.model.config.vocab_size={size + 1}", "actor.model.config.eos_token_id=null"]
    job += ["actor.model.config.num_hidden_layers=1", "global_batch_size=4", "ppo.kl_coef=0"]
    assert train(*job, f"tokenizer.path={path}", "max_steps=1")[0] == 0
    code, _, (error,) = train(*job, f"tokenizer.path={other}", "max_steps=2")
    assert code == 2
    assert f"responses end with tokens [{ends[1]}], but [{ends[0]}] in {tmp_path}/run/" in error
    (saved,) = (tmp_path / "run/checkpoints").glob("step_*")
    change_job(saved, lambda values: values.pop("stop_token_ids"))  # as older versions saved it
    assert train(*job, f"tokenizer.path={path}", "max_steps=2")[0] == 0
    assert "resumed from step 1 of 2" in caplog.messages


def _model(folder: Path, size: int, seed: int) -> transformers.LlamaForCausalLM:
    torch.manual_seed(seed)
    model = transformers.LlamaForCausalLM(hf_llama(size))
    model.save_pretrained(folder)
    return model.eval()


def _mean_log_prob(model: transformers.LlamaForCausalLM, tokens: list[int]) -> float:
    """Mean over a response without a prompt: all tokens but the first, like TRL's mask."""
    with torch.no_grad():
        log_probs = model(torch.tensor([tokens])).logits[0].log_softmax(-1)
    predicted = [log_probs[at - 1, tokens[at]].item() for at in range(1, len(tokens))]
    return sum(predicted) / len(predicted)


WITHOUT_PROMPTS = (
    {"prompt": "", "chosen": "the sky is blue", "rejected": "a sea"},
    {"prompt": "", "chosen": "blue", "rejected": "blue sky and sea"},
    {"prompt": "", "chosen": "sea", "rejected": "what?"},
    {"chosen": "the colour", "rejected": "what"},
)


@pytest.mark.parametrize("layout", ["shared", "paired", "padded"])
def test_pairs_without_prompts_have_the_loss_of_trl(
    layout: str, tmp_path: Path, train, tokenizer: tuple[str, int]
) -> None:
    """IPO, which divides by the number of predicted tokens, in training and evaluation."""
    path, size = tokenizer
    models = [_model(tmp_path / name, size + 1, n) for n, name in enumerate(("policy", "other"))]
    inner, beta, losses = AutoTokenizer.from_pretrained(path), 0.1, []
    for row in WITHOUT_PROMPTS:
        ratios = []
        for name in ("chosen", "rejected"):
            tokens = inner(row[name] + inner.eos_token)["input_ids"]
            policy, other = (_mean_log_prob(model, tokens) for model in models)
            ratios.append(policy - other)
        losses.append((ratios[0] - ratios[1] - 1 / (2 * beta)) ** 2)
    source = _write(tmp_path / "pairs.jsonl", *WITHOUT_PROMPTS)
    code, _, errors = train(
        *("--config", "dpo_tiny", f"output_dir={tmp_path}/out", "data.format=auto"),
        *(f"data.train={source}", f"data.eval={source}", "data.eval_fraction=0"),
        *("actor.model.config=null", f"actor.model.path={tmp_path}/policy"),
        *(f"reference.model.path={tmp_path}/other", f"tokenizer.path={path}"),
        *("dpo.loss_type=ipo", f"dpo.beta={beta}", f"packing.layout={layout}"),
        *("global_batch_size=4", "max_steps=1", "telemetry.eval_every=1", "telemetry.log_every=1"),
    )
    assert code == 0, errors
    lines = records(tmp_path / "out")
    expected = pytest.approx(sum(losses) / len(losses), rel=LOSS_BOUND)
    assert next(line["eval_loss"] for line in lines if "eval_loss" in line) == expected
    assert next(line["loss"] for line in lines if "loss" in line) == expected


@pytest.mark.parametrize("layout", ["shared", "paired"])
def test_responses_without_prompts_have_the_scores_of_transformers(
    layout: str, tmp_path: Path, command: Command, tokenizer: tuple[str, int]
) -> None:
    path, size = tokenizer
    _model(tmp_path / "model", size + 1, 0)
    source = _write(tmp_path / "pairs.jsonl", *WITHOUT_PROMPTS)
    code, _, errors = command(
        *("train", "--config", "reward_tiny", f"output_dir={tmp_path}/out", "data.format=auto"),
        *(f"data.train={source}", f"data.eval={source}", "data.eval_fraction=0"),
        *("reward.model.config=null", f"reward.model.path={tmp_path}/model"),
        *(f"tokenizer.path={path}", "optimizer.lr=0", f"packing.layout={layout}"),
        *("global_batch_size=4", "max_steps=1", "telemetry.eval_every=1"),
    )
    assert code == 0, errors
    code, _, errors = command("convert", f"{tmp_path}/out", f"{tmp_path}/hf")
    assert code == 0, errors
    model = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "hf")
    inner, margins = AutoTokenizer.from_pretrained(path), []
    for row in WITHOUT_PROMPTS:
        with torch.no_grad():
            chosen, rejected = (
                model(**inner(row[name] + inner.eos_token, return_tensors="pt")).logits.item()
                for name in ("chosen", "rejected")
            )
        margins.append(chosen - rejected)
    lines = records(tmp_path / "out")
    found = next(line["eval_margin"] for line in lines if "eval_margin" in line)
    assert found == pytest.approx(sum(margins) / len(margins), abs=LOGIT_BOUND)
    assert max(map(abs, margins)) > 100 * LOGIT_BOUND
