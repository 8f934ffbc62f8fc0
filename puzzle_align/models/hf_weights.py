"""Fill a model chunk from Hugging Face tensors under any plan, and write such a directory again."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from puzzle_align.layout.model import BYTES_PER_PARAMETER, ModelSpec, to_hf_config
from puzzle_align.models import weight_map
from puzzle_align.models.chunk import ModelChunk
from puzzle_align.models.families import LAYER_RULES
from puzzle_align.models.megatron_config import DTYPES
from puzzle_align.models.weight_map import Rule, Shape
from puzzle_align.models.weight_sources import (
    INDEX_NAME,
    SINGLE_NAME,
    RandomSource,
    WeightSource,
    open_weights,
)

__all__ = [
    "RandomSource",
    "WeightSource",
    "export_hf",
    "hf_shapes",
    "load_weights",
    "open_weights",
]


def hf_shapes(spec: ModelSpec) -> dict[str, Shape]:
    """Name and shape of every tensor of the model's Hugging Face checkpoint, in file order."""
    shapes: dict[str, Shape] = {}
    for names, rule in _model_rules(spec):
        shapes.update(zip(names, rule.shapes(spec), strict=True))
    return shapes


def load_weights(chunk: ModelChunk, spec: ModelSpec, source: WeightSource) -> None:
    """Fill every parameter of ``chunk`` in place, reading only this rank's boxes.

    Raises:
        ValueError: naming file and tensor, for one that is missing, unexpected or mis-shaped.
    """
    source.check(hf_shapes(spec))
    group = chunk.pg_collection.tp
    parameters = dict(chunk.named_parameters())
    filled = set()
    for hf_names, megatron_name, rule in _chunk_rules(chunk, spec, set(parameters)):
        shapes = rule.shapes(spec)
        boxes = rule.operator.boxes(spec, shapes, group.size(), group.rank())
        parts = [
            source.read(name, shape, box)
            for name, shape, box in zip(hf_names, shapes, boxes, strict=True)
        ]
        value = rule.operator.merge(spec, parts, group.size())
        assert value.shape == parameters[megatron_name].shape, megatron_name
        with torch.no_grad():
            parameters[megatron_name].copy_(value)
        filled.add(megatron_name)
    assert filled == set(parameters), set(parameters) - filled


def export_hf(
    chunks: Sequence[ModelChunk],
    spec: ModelSpec,
    directory: str | Path,
    dtype: str = "bf16",
    max_shard_bytes: int = 5_000_000_000,
) -> None:
    """Write ``config.json`` and safetensors (sharded, with an index, if large) for transformers.

    Args:
        chunks: all chunks of the model, on one pipeline and tensor rank.
        spec: the model.
        directory: made if absent; tokenizer files are the caller's.
        dtype: of the files, ``fp32`` or ``bf16``.
        max_shard_bytes: no file holds more, unless a single tensor does.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    shards = _shards(hf_shapes(spec), BYTES_PER_PARAMETER[dtype], max_shard_bytes)
    tensors = _hf_tensors(chunks, spec)
    files: dict[str, str] = {}
    for number, names in enumerate(shards, start=1):
        file = SINGLE_NAME
        if len(shards) > 1:
            file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        content = {}
        for expected in names:
            name, tensor = next(tensors)
            assert name == expected
            content[name] = tensor.detach().to("cpu", DTYPES[dtype]).contiguous()
        save_file(content, directory / file, metadata={"format": "pt"})
        files.update(dict.fromkeys(names, file))
    if len(shards) > 1:
        num_parameters = sum(torch.Size(shape).numel() for shape in hf_shapes(spec).values())
        total = num_parameters * BYTES_PER_PARAMETER[dtype]
        index = {"metadata": {"total_size": total}, "weight_map": files}
        (directory / INDEX_NAME).write_text(json.dumps(index, indent=2))
    config = {**to_hf_config(spec), "torch_dtype": str(DTYPES[dtype]).removeprefix("torch.")}
    (directory / "config.json").write_text(json.dumps(config, indent=2))


def _model_rules(spec: ModelSpec) -> Iterator[tuple[tuple[str, ...], Rule]]:
    """Every Hugging Face tensor of the model once, with its rule."""
    yield weight_map.EMBEDDING.hf, weight_map.EMBEDDING
    for layer in range(spec.num_hidden_layers):
        for rule in LAYER_RULES[spec.model_type]:
            yield _layer_names(rule, layer), rule
    yield weight_map.FINAL_NORM.hf, weight_map.FINAL_NORM
    if not spec.tie_word_embeddings:
        yield _head_rule(spec).hf, _head_rule(spec)


def _head_rule(spec: ModelSpec) -> Rule:
    if spec.head == "scalar":
        return weight_map.SCALAR_HEAD
    return weight_map.TIED_HEAD if spec.tie_word_embeddings else weight_map.HEAD


def _layer_names(rule: Rule, layer: int) -> tuple[str, ...]:
    return tuple(f"model.layers.{layer}.{name}" for name in rule.hf)


def _chunk_rules(
    chunk: ModelChunk, spec: ModelSpec, parameters: set[str]
) -> Iterator[tuple[tuple[str, ...], str, Rule]]:
    """``(Hugging Face names, parameter name, rule)`` of every parameter of ``chunk``."""
    if chunk.is_first:
        yield weight_map.EMBEDDING.hf, weight_map.EMBEDDING.megatron, weight_map.EMBEDDING
    layers: Any = chunk.decoder.layers
    for index, layer in enumerate(layers):
        for rule in LAYER_RULES[spec.model_type]:
            name = f"decoder.layers.{index}.{rule.megatron}"
            if rule.fused is not None and name not in parameters:
                name = f"decoder.layers.{index}.{rule.fused}"
            yield _layer_names(rule, layer.layer_number - 1), name, rule
    if not chunk.is_last:
        return
    yield weight_map.FINAL_NORM.hf, weight_map.FINAL_NORM.megatron, weight_map.FINAL_NORM
    head = _head_rule(spec)
    if not (spec.tie_word_embeddings and chunk.is_first):
        yield head.hf, head.megatron, head


def _hf_tensors(chunks: Sequence[ModelChunk], spec: ModelSpec) -> Iterator[tuple[str, Tensor]]:
    """Every tensor in file order, each made from its parameter when its turn comes."""
    owners: dict[tuple[str, ...], tuple[Tensor, Rule]] = {}
    for chunk in chunks:
        assert chunk.pg_collection.tp.size() == 1, "export needs one tensor rank"
        parameters = dict(chunk.named_parameters())
        for hf_names, name, rule in _chunk_rules(chunk, spec, set(parameters)):
            owners.setdefault(hf_names, (parameters[name], rule))
    for hf_names, _rule in _model_rules(spec):
        parameter, rule = owners[hf_names]
        yield from zip(hf_names, rule.operator.split(spec, parameter), strict=True)


def _shards(shapes: dict[str, Shape], item_bytes: int, max_bytes: int) -> list[list[str]]:
    """Names of each file's tensors, in order, filled greedily."""
    shards: list[list[str]] = [[]]
    used = 0
    for name, shape in shapes.items():
        size = torch.Size(shape).numel() * item_bytes
        if shards[-1] and used + size > max_bytes:
            shards.append([])
            used = 0
        shards[-1].append(name)
        used += size
    return shards
