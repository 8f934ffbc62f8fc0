"""Hugging Face directories: what is taken in is what transformers and safetensors read."""

import json
import random
import shutil
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

from puzzle_align.config.job import JobConfig
from puzzle_align.config.sections.models import ModelConfig, RoleConfig
from puzzle_align.layout.hf_config import from_hf_config, to_hf_config
from puzzle_align.layout.model import ModelSpec
from puzzle_align.layout.weights import hf_shapes
from puzzle_align.models.chunk import ModelChunk
from puzzle_align.models.hf.sources import INDEX_NAME, SINGLE_NAME
from puzzle_align.models.hf.weights import _file_tensors
from puzzle_align.stages.weights import role_weights
from tests.fuzz.harness import Case
from tests.fuzz.mutate import damaged_bytes
from tests.fuzz.values import changed_json
from tests.jobs import model_of
from tests.unit.test_hf_weights import one_rank_chunk

SIZES = {
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 2,
    "vocab_size": 20,
    "max_position_embeddings": 64,
}
CONFIGS = {
    "llama": transformers.LlamaConfig,
    "mistral": transformers.MistralConfig,
    "qwen2": transformers.Qwen2Config,
    "qwen3": transformers.Qwen3Config,
    "phi3": transformers.Phi3Config,
}
SCALING = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
# Keys that change what is computed, each with the one value that is computed.
ONLY: dict[str, Any] = {
    "hidden_act": "silu",
    "mlp_bias": False,
    "use_sliding_window": False,
    "layer_types": ["full_attention"] * 2,
    "partial_rotary_factor": 1.0,
    "num_experts": 0,
    "num_local_experts": 0,
    "quantization_config": None,
}
# Further keys of a config that are read, each with a value that is right.
OTHER_KEYS = {
    **ONLY,
    "sliding_window": 32,
    "rope_scaling": SCALING,
    "rope_parameters": {**SCALING, "rope_theta": 5e5},
    "eos_token_id": [2, 3],
    "attention_bias": False,
    "id2label": {"0": "reward"},
    "num_labels": 1,
}
DTYPES = (
    *(torch.int8, torch.uint8, torch.int32, torch.int64, torch.bool, torch.float64),
    *(torch.complex64, torch.float8_e4m3fn, torch.float16, torch.bfloat16),
)
SHARDS = ("a.safetensors", "b.safetensors")
Tensors = dict[str, torch.Tensor]
Taken = tuple[ModelSpec, ModelChunk]


class Kind:
    limit_s = 2
    imports = ()

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "model"
        self._chunks: dict[Any, ModelChunk] = {}
        model = ModelConfig(path=str(self._folder))
        self._job = JobConfig(actor=RoleConfig(model=model))
        # Both ways to tie, and both of laying tensors in files: one for each of the families.
        self._good: list[tuple[dict[str, Any], Tensors]] = []
        for number, family in enumerate(CONFIGS):
            given = {**SIZES, "model_type": family, "tie_word_embeddings": number % 2 == 1}
            spec = from_hf_config(given, family)
            torch.manual_seed(number)
            tensors = {name: torch.randn(shape) for name, shape in hf_shapes(spec).items()}
            self._good.append((to_hf_config(spec), tensors))
            self._chunk(spec)

    def case(self, draw: random.Random) -> Case:
        """A directory of a family, with one or two damages."""
        config, tensors = draw.choice(self._good)
        shutil.rmtree(self._folder, ignore_errors=True)
        _write(self._folder, config, tensors, sharded=draw.random() < 0.5)
        damages = [draw.choice(_DAMAGES) for _ in range(draw.choice((1, 1, 1, 2)))]
        descriptions = [damage(draw, self._folder, tensors) for damage in damages]
        return Case(f"{config['model_type']}: {'; '.join(descriptions)}", self._use, self._wrong)

    def _use(self) -> Taken:
        """Load the models like a job."""
        spec = model_of(self._job, "actor").spec
        weights = role_weights(model_of(self._job, "actor"), self._job)
        weights.check()
        weights.fingerprint()
        chunk = self._chunk(spec)
        weights.fill(chunk)
        return spec, chunk

    def _chunk(self, spec: ModelSpec) -> ModelChunk:
        """Chunk with room for weights of these shapes; it is used for nothing else."""
        key = (spec.model_type, spec.num_key_value_heads, *hf_shapes(spec).items())
        if key not in self._chunks:
            self._chunks[key] = one_rank_chunk(spec, "fp32")
        return self._chunks[key]

    def _wrong(self, taken: Taken) -> str | None:
        spec, chunk = taken
        config = json.loads((self._folder / "config.json").read_text())
        return _wrong_spec(spec, config) or _wrong_weights(spec, chunk, self._folder)


def _write(folder: Path, config: dict[str, Any], tensors: Tensors, *, sharded: bool) -> None:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    if not sharded:
        save_file(tensors, folder / SINGLE_NAME)
        return
    files = {name: SHARDS[number % 2] for number, name in enumerate(tensors)}
    for file in SHARDS:
        save_file({name: tensors[name] for name in tensors if files[name] == file}, folder / file)
    index = {"metadata": {"total_size": 1}, "weight_map": files}
    (folder / INDEX_NAME).write_text(json.dumps(index))


def _wrong_spec(spec: ModelSpec, config: dict[str, Any]) -> str | None:
    """Dimensions that differ from the file's, or from those transformers reads in it."""
    plain = [*SIZES, "rms_norm_eps", "initializer_range", "tie_word_embeddings", "eos_token_id"]
    is_phi3 = config["model_type"] == "phi3"
    plain += ["bos_token_id", "pad_token_id", "sliding_window"][
        : 3 if is_phi3 or config["model_type"] == "mistral" else 2
    ]
    for key in plain:
        own, said = getattr(spec, key), config.get(key)
        own = list(own) if isinstance(own, tuple) else own
        if said is not None and (own != said or isinstance(own, bool) != isinstance(said, bool)):
            return f"{key} is {own}, and the file says {said!r}"
    for key, only in ONLY.items():
        said = None if is_phi3 and key == "partial_rotary_factor" else config.get(key)
        if said is not None and (said != only or isinstance(said, bool) != isinstance(only, bool)):
            return f"{key} is {said!r}"
    try:
        theirs = CONFIGS[spec.model_type].from_dict(deepcopy(config))
    except Exception:  # noqa: BLE001 - it may be pickier: what it refuses has no other meaning
        return None
    rope: Any = theirs.rope_parameters
    found = {key: getattr(spec, key) for key in plain} | {"rope_theta": spec.rope_theta}
    expected = {key: getattr(theirs, key, found[key]) for key in plain}
    expected["rope_theta"] = rope["rope_theta"]
    if is_phi3:
        found["partial_rotary_factor"] = spec.partial_rotary_factor
        expected["partial_rotary_factor"] = rope["partial_rotary_factor"]
    scaling = spec.rope_scaling
    for key in SCALING:
        found[key] = ("default" if scaling is None else "llama3") if key == "rope_type" else None
        expected[key] = rope["rope_type"] if key == "rope_type" else found[key]
        if scaling is not None and key != "rope_type":
            found[key], expected[key] = getattr(scaling, key), rope[key]
    # With null for these it would not compute at all.
    never_null = ("rope_theta", "rope_type", "head_dim")
    for key, own in found.items():
        if expected[key] is None and key in never_null:
            continue
        if (list(own) if isinstance(own, tuple) else own) != expected[key]:
            return f"{key} is {own}, and transformers says {expected[key]!r}"
    return None


def _wrong_weights(spec: ModelSpec, chunk: ModelChunk, folder: Path) -> str | None:
    """Weights of the chunk that differ from those safetensors reads from the files."""
    saved: Tensors = {}
    for file in sorted(folder.glob("*.safetensors")):
        for name, tensor in load_file(file).items():
            if name in saved and not torch.equal(saved[name], tensor):
                return f"{name} is there twice"
            saved[name] = tensor
    for name, own in _file_tensors([chunk], spec):
        if not saved[name].is_floating_point() or not own.isfinite().all():
            return f"{name} is of {saved[name].dtype}, or not finite"
        if not torch.equal(own, saved[name].float()):
            return f"{name} is not what the file holds"
    table = saved["model.embed_tokens.weight"].float()
    head = saved.get("lm_head.weight", table).float()
    if spec.tie_word_embeddings and not torch.equal(head, table):
        return "a head of its own is left out"
    return None


def _config_value(draw: random.Random, folder: Path, tensors: Tensors) -> str:
    """One value of the config, or of what it has inside, is another; or a key more."""
    path = folder / "config.json"
    changed = _read(path)
    if not isinstance(changed, dict):
        return "nothing"
    if draw.random() < 0.3:
        key = draw.choice([*OTHER_KEYS])
        changed[key] = deepcopy(OTHER_KEYS[key])
    what, text = changed_json(draw, changed, most=1)
    path.write_text(text)
    return f"config.json: {what}"


def _index_value(draw: random.Random, folder: Path, tensors: Tensors) -> str:
    path = folder / INDEX_NAME
    there = path.is_symlink() or path.exists()
    changed = _read(path) if there else {"weight_map": dict.fromkeys(tensors, SINGLE_NAME)}
    if not isinstance(changed, dict):
        return "nothing"
    what, text = "as it was", json.dumps(changed)
    if draw.random() < 0.9:
        what, text = changed_json(draw, changed, most=1)
    path.write_text(text)
    return f"index: {what}"


def _header_value(draw: random.Random, folder: Path, tensors: Tensors) -> str:
    """A value in a safetensors header is another."""
    path = draw.choice(_files(folder))
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = _parsed(data[8 : 8 + length])
    if header is None:
        return "nothing"
    what, text = changed_json(draw, header, most=1)
    path.write_bytes(len(text).to_bytes(8, "little") + text.encode() + data[8 + length :])
    return f"{path.name}: header {what}"


def _bytes(draw: random.Random, folder: Path, tensors: Tensors) -> str:
    """A file's bytes are others: half the time in its first kilobyte."""
    path = draw.choice([path for path in folder.iterdir() if path.is_file()])
    data = path.read_bytes()
    if not data:
        return "nothing"
    end = 1024 if draw.random() < 0.5 else len(data)
    what, first = damaged_bytes(draw, data[:end])
    path.write_bytes(first + data[end:])
    return f"{path.name}: {what}"


def _tensor(draw: random.Random, folder: Path, tensors: Tensors) -> str:
    """A tensor is of another dtype or shape, holds other numbers, is missing, or one more."""
    path = draw.choice(_files(folder))
    try:
        content = load_file(path)
    except Exception:  # noqa: BLE001 - the damage before this one
        return "nothing"
    if not content:
        return "nothing"
    name = draw.choice(sorted(content))
    what = draw.choice(("dtype", "dtypes", "value", "value", "shape", "missing", "more", "swapped"))
    own = content[name].float()
    if what.startswith("dtype"):
        dtype = draw.choice(DTYPES)
        names = content if what == "dtypes" else [name]
        content |= {name: content[name].float().to(dtype) for name in names}
        what = f"{what} {dtype}"
    elif what == "value":
        value = draw.choice((float("nan"), float("inf"), float("-inf"), 3.4e38, 1e-45, -0.0))
        own.view(-1)[draw.randrange(own.numel())] = value
        content[name] = own
        what = f"value {value}"
    elif what == "shape":
        content[name] = draw.choice((own.T.contiguous(), own[:-1], own[None], own.view(-1)))
    elif what == "missing":
        del content[name]
    elif what == "more":
        more = draw.choice((*tensors, "lm_head.weight", "score.weight", "model.layers.2.x", "\0"))
        content[more] = draw.choice((torch.randn(20, 8), tensors.get(more, own).clone()))
        what = f"more: {more!r}"
    else:
        other = draw.choice(sorted(content))
        content[name], content[other] = content[other].clone(), content[name].clone()
    save_file({key: value.contiguous() for key, value in content.items()}, path)
    return f"{path.name}: {name}: {what}"


def _files_elsewhere(draw: random.Random, folder: Path, tensors: Tensors) -> str:
    """A file is missing, empty, another's copy, a folder, or leads nowhere."""
    paths = sorted(path for path in folder.iterdir() if path.is_file())
    if not paths or (folder / SINGLE_NAME).is_dir():
        return "nothing"
    path, other = draw.choice(paths), draw.choice(paths)
    what = draw.choice(("missing", "empty", "another", "folder", "loop", "both"))
    data = other.read_bytes()
    if what == "both" and not (folder / SINGLE_NAME).is_symlink():
        save_file({name: tensor + 1 for name, tensor in tensors.items()}, folder / SINGLE_NAME)
        return "a single file of other numbers"
    path.unlink()
    if what == "empty":
        path.touch()
    elif what == "another":
        path.write_bytes(data)
        what = f"is {other.name}"
    elif what == "folder":
        path.mkdir()
    elif what == "loop":
        path.symlink_to(path)
    return f"{path.name}: {what}"


def _read(path: Path) -> Any:
    """The JSON of a file; None where there is none, or the damage before made it too deep."""
    try:
        return _parsed(path.read_bytes())
    except OSError:
        return None


def _parsed(data: bytes) -> Any:
    if data.count(b"[") + data.count(b"{") > 300:
        return None
    try:
        return json.loads(data)
    except ValueError:
        return None


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("*.safetensors") if path.is_file()) or [
        folder / "config.json"
    ]


_Damage = Callable[[random.Random, Path, Tensors], str]
_DAMAGES: tuple[_Damage, ...] = (
    *(_config_value, _config_value, _config_value, _index_value, _header_value),
    *(_bytes, _bytes, _tensor, _tensor, _files_elsewhere),
)
