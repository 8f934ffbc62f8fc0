"""generate: what transformers would answer, from any source of weights, whatever the plan."""

import json
import re
import resource
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from puzzle_align.commands import convert
from puzzle_align.commands.generate import _append
from puzzle_align.data.tokenize import ByteTokenizer
from puzzle_align.layout.hf_config import to_hf_config
from tests.bounds import LOGIT_BOUND
from tests.checkpoints import change_job, seal
from tests.dist.several_models import SPECS
from tests.e2e.conftest import Command
from tests.e2e.launch import ROOT, run_job, torchrun
from tests.specs import hf_llama

BYTES = ByteTokenizer()
QUESTIONS = ("Why?", "a", "This prompt is longer than its limit", "wörld", "To be or")
LIMIT, NEW_TOKENS = 20, 12
SIZES = ("global_batch_size=2", "generation.decode_batch_size=2", "generation.prefill_tokens=24")


@dataclass(frozen=True)
class Folder:
    """A model, prompts, and the greedy responses that transformers gives."""

    path: Path
    stop: int
    expected: list[dict[str, Any]]

    @property
    def arguments(self) -> list[str]:
        """All but the model and the output."""
        return [
            *("--prompts", f"{self.path}/prompts.jsonl", "--prompt-key", "question"),
            *("tokenizer.path=byte", "generation.temperature=0", "engine.device=cpu"),
            *(f"data.max_prompt_length={LIMIT}", f"generation.max_new_tokens={NEW_TOKENS}"),
            f"generation.stop_token_ids=[{self.stop}]",
        ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    path = tmp_path_factory.mktemp("generate")
    torch.manual_seed(5)
    config = hf_llama(301, max_position_embeddings=64)
    model = transformers.LlamaForCausalLM(config).eval()
    model.save_pretrained(path / "hf")
    rows = [json.dumps({"question": text}) for text in QUESTIONS]
    (path / "prompts.jsonl").write_text("\n".join(rows), encoding="utf-8")
    whole = [_greedy(model, text) for text in QUESTIONS]
    stop = whole[0][0][5]
    expected = [_line(text, *answer, stop) for text, answer in zip(QUESTIONS, whole, strict=True)]
    assert {line["stopped"] for line in expected} == {True, False}
    return Folder(path, stop, expected)


def _greedy(model: Any, text: str) -> tuple[list[int], list[float]]:
    prompt = [*BYTES.bos_ids, *BYTES.encode_batch([text])[0]][-LIMIT:]
    made = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        eos_token_id=None,
        output_logits=True,
        return_dict_in_generate=True,
    )
    logits = torch.cat(made.logits)
    first, second = logits.topk(2).values.T
    assert (first - second).min() > 3 * LOGIT_BOUND, "margins that rounding could turn"
    tokens = made.sequences[0, len(prompt) :]
    log_probs = logits.log_softmax(-1).gather(1, tokens[:, None])[:, 0]
    return tokens.tolist(), log_probs.tolist()


def _line(text: str, tokens: list[int], log_probs: list[float], stop: int) -> dict[str, Any]:
    stopped = stop in tokens
    length = tokens.index(stop) + 1 if stopped else len(tokens)
    return {
        "prompt": text,
        "response": BYTES.decode(tokens[: length - stopped]),
        "tokens": tokens[:length],
        "log_probs": log_probs[:length],
        "stopped": stopped,
    }


def _check(folder: Folder, lines: list[str]) -> None:
    """These are the expected responses, in order."""
    found = [json.loads(line) for line in lines]
    for line, expected in zip(found, folder.expected, strict=True):
        np.testing.assert_allclose(
            line.pop("log_probs"), expected["log_probs"], rtol=0, atol=LOGIT_BOUND
        )
        assert line == {key: value for key, value in expected.items() if key != "log_probs"}


def test_one_rank_answers_as_transformers(folder: Folder, command: Command) -> None:
    code, out, _ = command("generate", "--model", f"{folder.path}/hf", *folder.arguments, *SIZES)
    assert code == 0
    _check(folder, out)


def test_a_full_disk_is_one_line(folder: Folder, command: Command, tmp_path: Path) -> None:
    output = tmp_path / "responses.jsonl"
    output.symlink_to("/dev/full")
    model = ("--model", f"{folder.path}/hf", "--output", str(output))
    code, _, err = command("generate", *model, *folder.arguments, *SIZES)
    assert code == 2
    assert err[-1] == (
        f"error: {output} cannot be written (No space left on device): it ends with the responses"
        " to earlier prompts; free space or mend the disk there, and delete it or name a new file"
    )
    assert not any("Traceback" in line for line in err)


def test_two_ranks_write_the_same_file(folder: Folder, tmp_path: Path) -> None:
    """Two replicas; the last portion has one prompt, and the second replica none."""
    output = tmp_path / "responses.jsonl"
    job = run_job(
        *("--model", f"{folder.path}/hf", "--output", str(output)),
        *(*folder.arguments, *SIZES, "actor.parallel.data_parallel_size=2"),
        script=ROOT / "launch" / "generate.py",
    )
    assert job.returncode == 0, job.stderr
    _check(folder, output.read_text(encoding="utf-8").splitlines())
    assert job.stdout == ""
    err = job.stderr.splitlines()
    assert err[0] == "data: 5 prompts, 1 of them truncated"
    assert re.fullmatch(r"step 2/3 length \S+ \S+ responses/s \S+ tok/s eta \S+", err[2])
    assert re.fullmatch(r"5 responses of \d+ tokens in \d+s: \S+ tok/s", err[4])
    assert len(err) == 5


PLANS = [
    ("pipeline_model_parallel_size=2",),
    ("tensor_model_parallel_size=2",),
    ("tensor_model_parallel_size=2", "sequence_parallel=true"),
]


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("steps", [1, 4])
@pytest.mark.parametrize("eager", [True, False])
@pytest.mark.parametrize("plan", PLANS)
def test_two_gpus_answer_as_transformers(
    plan: tuple[str, ...], eager: bool, steps: int, folder: Folder, tmp_path: Path
) -> None:
    _check(folder, _on_gpus(folder, tmp_path, plan, eager, steps))


@pytest.mark.slow  # its ranks take turns on the device: other tests beside them would add theirs
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("eager", [True, False])
@pytest.mark.parametrize("plan", PLANS)
def test_two_ranks_of_one_gpu_answer_as_transformers(
    plan: tuple[str, ...], eager: bool, folder: Folder, tmp_path: Path
) -> None:
    """With NCCL's kernels in the graphs, and host functions that feed its sockets."""
    _check(folder, _on_gpus(folder, tmp_path, plan, eager, steps=4, on_one_gpu=True))


def _on_gpus(
    folder: Folder,
    path: Path,
    plan: tuple[str, ...],
    eager: bool,
    steps: int,
    on_one_gpu: bool = False,
) -> list[str]:
    """Lines that two ranks write."""
    output = path / "responses.jsonl"
    job = torchrun(
        *("--model", f"{folder.path}/hf", "--output", str(output), *folder.arguments, *SIZES),
        *("engine.device=cuda", "engine.dtype=fp32"),
        *(f"actor.parallel.{key}" for key in plan),
        f"generation.num_scheduler_steps={steps}",
        f"generation.enforce_eager={str(eager).lower()}",
        script=ROOT / "launch" / "generate.py",
        on_one_gpu=on_one_gpu,
    )
    assert job.returncode == 0, job.stderr
    return output.read_text(encoding="utf-8").splitlines()


def test_a_checkpoint_answers_as_its_model(
    folder: Folder, command: Command, tmp_path: Path
) -> None:
    """With its weights, also in another precision than they were saved in."""
    convert.to_checkpoint(folder.path / "hf", tmp_path / "checkpoints")
    for step in (".", "step_00000000"):
        source = str(tmp_path / "checkpoints" / step)
        code, out, _ = command("generate", "--model", source, *folder.arguments)
        assert code == 0
        _check(folder, out)
    in_bf16 = [
        command("generate", "--model", source, *folder.arguments, "engine.dtype=bf16")[:2]
        for source in (str(tmp_path / "checkpoints"), f"{folder.path}/hf")
    ]
    assert in_bf16[0] == in_bf16[1]
    assert in_bf16[0][1] != out


def test_draws_do_not_depend_on_the_portions(folder: Folder, command: Command) -> None:
    arguments = ["generate", "--model", f"{folder.path}/hf", *folder.arguments]
    arguments += ["generation.temperature=0.9", "generation.num_generations=2"]
    whole, in_portions, other = (
        [json.loads(line) for line in command(*arguments, *more)[1]]
        for more in ([], SIZES, ["seed=43"])
    )
    assert [line["prompt"] for line in whole] == [text for text in QUESTIONS for _ in range(2)]
    tokens, again, others = (
        [line["tokens"] for line in lines] for lines in (whole, in_portions, other)
    )
    assert tokens == again
    assert len({str(each) for each in (*tokens, *others)}) == 20


def test_a_checkpoint_s_job_says_how_to_sample(
    folder: Folder, command: Command, tmp_path: Path
) -> None:
    convert.to_checkpoint(folder.path / "hf", tmp_path)

    def change(job: dict[str, Any]) -> None:
        job["config"]["tokenizer"]["path"] = "byte"
        sampling = {"temperature": 0.0, "max_new_tokens": 3, "num_generations": 4}
        job["config"]["generation"] |= sampling
        job["config"]["data"]["apply_chat_template"] = is_chat

    for is_chat in (False, True):
        change_job(tmp_path / "step_00000000", change)
        asked = ("generate", "--model", str(tmp_path), "--prompt", "a", "--prompt", "Why?")
        lines = [json.loads(line) for line in command(*asked, "engine.device=cpu")[1]]
        assert [line["prompt"] for line in lines] == ["a", "Why?"]  # one response to each
        expected = [folder.expected[number]["tokens"][:3] for number in (1, 0)]
        assert ([line["tokens"] for line in lines] == expected) == (not is_chat)
    message = str(tmp_path / "messages.jsonl")
    half = {"note": "half \ud83d of an emoji"}
    Path(message).write_text(json.dumps({"prompt": [{"role": "user", "content": "a"}], **half}))
    asked = ("generate", "--model", str(tmp_path), "--prompts", message, "engine.device=cpu")
    (line,) = (json.loads(line) for line in command(*asked)[1])
    assert line["tokens"] == lines[0]["tokens"] and line["note"] == half["note"]


def test_other_columns_stay_and_a_converted_directory_brings_its_tokenizer(
    folder: Folder, command: Command, tmp_path: Path
) -> None:
    convert.to_checkpoint(folder.path / "hf", tmp_path / "run")

    def change(job: dict[str, Any]) -> None:
        job["config"]["tokenizer"]["path"] = "byte"

    change_job(tmp_path / "run" / "step_00000000", change)
    convert.to_hf(tmp_path / "run", tmp_path / "hf")
    (tmp_path / "hf" / "generation_config.json").write_text(
        json.dumps({"eos_token_id": [258, folder.stop]})
    )
    prompts = tmp_path / "prompts.csv"
    prompts.write_text("id,question,response\n7,Why?,theirs\n")
    asked = ("--model", f"{tmp_path}/hf", "--prompts", str(prompts), "--prompt-key", "question")
    how = ("generation.temperature=0", f"generation.max_new_tokens={NEW_TOKENS}")
    code, out, err = command("generate", *asked, *how, "engine.device=cpu")
    assert code == 0, err
    (line,) = map(json.loads, out)
    assert line.pop("id") == "7"
    _check(replace(folder, expected=folder.expected[:1]), [json.dumps(line)])


def _classifier(at: Path) -> list[str]:
    (at / "config.json").write_text(json.dumps(to_hf_config(SPECS["critic"])))
    return ["--model", str(at), "--prompt", "a"]


def _reward_checkpoint(at: Path) -> list[str]:
    step = at / "step_00000004"
    step.mkdir()
    about = {"model": to_hf_config(SPECS["critic"]), "dtype": "fp32", "world_size": 1}
    about["has_optimizer"] = True
    job = {"step": 4, "models": {"reward": about}, "config": {"stage": "reward"}}
    (step / "job.json").write_text(json.dumps(job))
    seal(step, 4)
    return ["--model", str(at), "--prompt", "a"]


def _output_is_there(at: Path) -> list[str]:
    (at / "out.jsonl").touch()
    return ["--prompt", "a", "--output", f"{at}/out.jsonl"]


LONG = ["--prompt", "x" * 60]


def _adapters_alone(at: Path) -> list[str]:
    (at / "adapter_config.json").write_text("{}")
    return ["--model", str(at), "--prompt", "a"]


MISTAKES: dict[str, tuple[Callable[[Path], list[str]], str]] = {
    "adapters alone": (
        _adapters_alone,
        r"--model: @ holds adapters \(adapter_config.json\) without their model; .*--merge\)",
    ),
    "no model": (
        lambda at: ["--model", str(at), "--prompt", "a"],
        r"--model: no Hugging Face model \(config.json\) there, and as a checkpoint: @: no .*",
    ),
    "classifier": (
        _classifier,
        r"--model @: a sequence classifier gives no next-token logits; give a language model",
    ),
    "reward model": (
        _reward_checkpoint,
        r"--model @: its reward gives no next-token logits; give a language model",
    ),
    "stop token": (
        lambda at: ["--prompt", "a", "generation.stop_token_ids=[301]"],
        r"generation.stop_token_ids: 301 is no token of the model, which has 301; .*",
    ),
    "long prompt": (
        lambda at: [*LONG, "data.truncation_mode=error"],
        r"--prompt 1: the prompt has 61 tokens, over the 54 that .*",
    ),
    "output": (
        _output_is_there,
        r"--output @/out.jsonl: it exists already; name a new file, or delete it",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_line(folder: Folder, command: Command, tmp_path: Path, name: str) -> None:
    make, expected = MISTAKES[name]
    arguments = make(tmp_path)
    if "--model" not in arguments:
        arguments += ["--model", f"{folder.path}/hf"]
    common = ("tokenizer.path=byte", "engine.device=cpu", "generation.max_new_tokens=10")
    code, out, err = command("generate", *arguments, *common)
    pattern = expected.replace("@", re.escape(str(tmp_path)))
    assert (code, out, len(err)) == (2, [], 1), err
    assert re.fullmatch(f"error: {pattern}", err[0]), err[0]


def test_responses_that_a_full_disk_does_not_take_leave_no_part_of_them(tmp_path: Path) -> None:
    output = tmp_path / "responses.jsonl"
    _append(output, ["first"])
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, before[1]))  # as a disk with so many bytes left
    try:
        with pytest.raises(OSError, match="File too large"):
            _append(output, ["second", "third"])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert output.read_text() == "first\n"
