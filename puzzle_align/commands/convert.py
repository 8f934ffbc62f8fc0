"""Convert a model from a checkpoint of any plan to a Hugging Face directory, or back.

Runs on one process.
"""

import logging
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from safetensors import SafetensorError

from puzzle_align.config.job import JobConfig
from puzzle_align.config.model_path import checkpoint_model
from puzzle_align.config.saved import Saved, Start, find_checkpoint
from puzzle_align.config.sections.models import ModelConfig, RewardConfig, RoleConfig
from puzzle_align.data.tokenize import ByteTokenizer, template_text
from puzzle_align.files.messages import reading, writing
from puzzle_align.layout.families import FAMILIES
from puzzle_align.layout.hf_config import from_hf_config, read_hf_config, to_hf_config
from puzzle_align.layout.job_plan import ContextPlan
from puzzle_align.layout.model import Dtype, ModelOptions, ModelSpec
from puzzle_align.layout.plan import ParallelPlan
from puzzle_align.models.hf.adapters import save_adapters
from puzzle_align.models.hf.sources import SafetensorsSource
from puzzle_align.models.hf.weights import export_hf
from puzzle_align.runtime.checkpoint.models import Trained, save_checkpoint
from puzzle_align.runtime.checkpoint.weights import CheckpointWeights
from puzzle_align.runtime.context import Context
from puzzle_align.runtime.groups.world import init_distributed, shutdown_distributed
from puzzle_align.stages.models import open_context
from puzzle_align.stages.weights import NamedWeights, Weights, saved_adapters

_TIMEOUT_S = 600.0
_TOKENIZER_FILES = (
    "added_tokens.json",
    "chat_template.jinja",
    "merges.txt",
    "special_tokens_map.json",
    "tekken.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
)

_logger = logging.getLogger(__name__)


def to_hf(checkpoint: Path, out: Path, role: str | None = None, *, merge: bool = False) -> None:
    """Write a model for transformers, with weights in the precision of training.

    Of a model with adapters it writes a PEFT directory, without the base.

    A reward model or a critic becomes a sequence classifier of one label; a warning says if
    transformers has none of its family. The job's tokenizer and chat template are written, too.

    Args:
        checkpoint: a ``step_*`` directory, or a folder of them (the latest is taken).
        out: a new or an empty directory.
        role: the model to convert; None: the one that the checkpoint's stage trains.
        merge: write the base, with its adapters added to its weights.

    Raises:
        ValueError: there is no complete checkpoint, or no such role in it, or ``out`` is not empty
            or cannot be written.
    """
    with reading(checkpoint):
        if not checkpoint.exists():
            raise ValueError(f"{checkpoint}: no such directory; give a checkpoint's")
        if (checkpoint / "config.json").is_file():
            raise ValueError(f"{checkpoint}: a Hugging Face model; --to-checkpoint converts it")
    saved = find_checkpoint(checkpoint)
    model = checkpoint_model(saved, role or saved.main_role)
    spec, dtype = model.spec, saved.metadata(model.role)["dtype"]
    _check_free(out)
    if merge and spec.lora is None:
        raise ValueError(f"--merge: the {model.role} of {saved.path} has no adapters; leave it out")
    weights: Weights = CheckpointWeights(saved, model.role, spec, new_head=None)
    if merge:
        weights = saved_adapters(saved, model.role, spec)
        weights.fingerprint()  # refuses another base
    weights.check()
    with _opened(weights, model.role, dtype) as context, writing(out), _all_or_nothing(out):
        out.mkdir(parents=True, exist_ok=True)
        _write_tokenizer(saved, out)  # first: what has a config.json is complete
        if spec.lora is not None and not merge:
            start: Start = saved.job["starts"][model.role]
            save_adapters(context.chunks, spec, out, dtype, start)
            if not (Path(start.path or "") / "config.json").is_file():
                _logger.warning(
                    "base_model_name_or_path=%s is no Hugging Face model: PEFT finds no base there;"
                    " set it, or convert with --merge",
                    start.path,
                )
        else:
            export_hf(context.chunks, spec, out, dtype)
    if spec.head == "scalar":
        _warn_of_scores(spec)


def to_checkpoint(hf_directory: Path, out: Path) -> None:
    """Write a Hugging Face model as a checkpoint of weights alone: ``out/step_00000000``.

    A job whose ``checkpoint.dir`` is ``out`` starts from these weights.

    Args:
        hf_directory: ``config.json`` and safetensors; all of it in bf16 stays so, else it becomes
            fp32.
        out: a new or an empty directory.

    Raises:
        ValueError: the model is not supported or not complete, or ``out`` is not empty.
    """
    config = read_hf_config(hf_directory)
    spec = from_hf_config(config, f"{hf_directory}/config.json")
    source = SafetensorsSource(hf_directory)
    weights = NamedWeights(spec, source)
    weights.check()  # before anything of these sizes is allocated
    _check_free(out)
    dtype = "bf16" if source.is_bf16 else "fp32"
    model = ModelConfig(path=str(hf_directory.resolve()))
    job = JobConfig(actor=RoleConfig(model=model))
    if spec.head == "scalar":
        job = JobConfig(stage="reward", reward=RewardConfig(model=model))
    with _opened(weights, job.main_role, dtype) as context:
        trained = {job.main_role: Trained(context, None)}
        save_checkpoint(out, 0, {"config": asdict(job)}, trained)


@contextmanager
def _opened(weights: Weights, role: str, dtype: Dtype) -> Iterator[Context]:
    """Open the whole model on this process, in a process group of its own."""
    planned = ContextPlan(
        role=role,
        workload="infer",
        model=weights.spec,
        options=ModelOptions(dtype=dtype),
        plan=ParallelPlan(),
        ranks=(0,),
    )
    world = init_distributed("cpu", _TIMEOUT_S)
    try:
        yield open_context(weights, planned, world)
    finally:
        shutdown_distributed()


def _warn_of_scores(spec: ModelSpec) -> None:
    """Warn if transformers cannot load the reward model, or scores unlike training."""
    if not FAMILIES[spec.model_type].has_classifier:
        name = to_hf_config(spec)["architectures"][0]
        _logger.warning("transformers has no %s: only puzzle-align can load this model", name)
        return
    eos = spec.eos_token_id if isinstance(spec.eos_token_id, tuple) else (spec.eos_token_id,)
    if spec.pad_token_id is None:
        _logger.warning("no pad_token_id in config.json: transformers scores one text at a time")
    elif spec.pad_token_id in eos:
        _logger.warning(
            "pad_token_id=%d also ends a text: transformers scores the token before it, training"
            " scored the end itself; give config.json another pad_token_id",
            spec.pad_token_id,
        )


@contextmanager
def _all_or_nothing(out: Path) -> Iterator[None]:
    """Write ``out``, new or empty; an error leaves it empty, so the command can be repeated."""
    try:
        yield
    except BaseException as error:
        for path in out.glob("*"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        # Of a full disk safetensors raises its own error, tokenizers a plain Exception.
        if isinstance(error, SafetensorError) or "(os error " in str(error):
            raise OSError(str(error)) from error
        raise


def _check_free(out: Path) -> None:
    with reading(out):
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise ValueError(f"{out} is there and not empty: give a new directory, or clear it")


def _write_tokenizer(saved: Saved, out: Path) -> None:
    """Write the tokenizer that the checkpoint's job reads, with its chat template.

    A warning says if its files are gone.
    """
    path, template = saved.tokenizer["path"], saved.tokenizer.get("chat_template")
    if path in (None, "byte"):
        ByteTokenizer(template and template_text(template)).save(out)
        return
    with reading(Path(path), key="tokenizer.path"):
        files = [each for name in _TOKENIZER_FILES if (each := Path(path) / name).is_file()]
    if not files:
        _logger.warning("no tokenizer at tokenizer.path=%s: none is written", path)
    start: Start | None = saved.job["starts"].get(saved.main_role)
    folders = (start and start.path, path)
    generation = (Path(each) / "generation_config.json" for each in folders if each)
    files += [file for file in generation if file.is_file()][:1]
    for file in files:
        shutil.copy(file, out / file.name)
    named = Path(path) / "additional_chat_templates"
    if template is None and named.is_dir():
        shutil.copytree(named, out / named.name)
    if template is not None:  # takes precedence over the one in tokenizer_config.json
        (out / "chat_template.jinja").write_text(template_text(template), encoding="utf-8")
