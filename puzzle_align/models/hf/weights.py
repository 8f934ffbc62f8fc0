"""Load a model chunk from Hugging Face tensors under any plan; export a Hugging Face directory."""

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import save_file
from torch import Tensor

from puzzle_align.layout.hf_config import to_hf_config
from puzzle_align.layout.model import BYTES_PER_PARAMETER, ModelSpec, without_adapters
from puzzle_align.layout.rules import EMBEDDING, HEAD, SCALAR_HEAD, Box, Parameter, Shape
from puzzle_align.layout.weights import (
    FilePlace,
    adapter_shapes,
    file_places,
    hf_shapes,
    is_adapter,
    is_moved,
    is_trained,
    num_parameters,
    tensor_shapes,
)
from puzzle_align.models.hf.sources import INDEX_NAME, SINGLE_NAME, WeightSource
from puzzle_align.models.inputs import DTYPES
from puzzle_align.models.shards import fill, parameters_of, slices, take_apart

if TYPE_CHECKING:
    from puzzle_align.models.chunk import ModelChunk


def load_weights(
    chunk: "ModelChunk",
    spec: ModelSpec,
    source: WeightSource,
    went_on: Callable[[], None] = lambda: None,
    lent: Collection[str] = (),
) -> None:
    """Fill the parameters of ``chunk`` in place, reading only this rank's boxes.

    Args:
        went_on: called after each parameter.
        lent: names of parameters to leave as they are: another model's, in its memory.

    Raises:
        ValueError: with file and tensor, if a tensor is missing, unexpected or mis-shaped, or has
            NaN or infinity on this rank.
    """
    source.check(hf_shapes(spec))
    parameters = [each for each in parameters_of(chunk, spec) if each[0].name not in lent]
    _fill(parameters, spec, source, went_on)
    if spec.tie_word_embeddings and source.holds(*HEAD.hf):
        _check_tied(parameters, source)


def load_adapters(chunk: "ModelChunk", spec: ModelSpec, source: WeightSource) -> None:
    """Fill the chunk's adapters in place, and its scalar head if the source has one.

    ValueError as ``load_weights``.
    """
    has_head = source.holds(*SCALAR_HEAD.hf)
    check_adapters(spec, source)
    adapters = [
        (parameter, value)
        for parameter, value in parameters_of(chunk, spec)
        if is_adapter(parameter.name) or (has_head and is_trained(spec, parameter.name))
    ]
    _fill(adapters, spec, source, lambda: None)


def check_adapters(spec: ModelSpec, source: WeightSource) -> None:
    """Raise a one-line ValueError if a tensor is missing or mis-shaped, or of a reward model."""
    has_head, (name,) = source.holds(*SCALAR_HEAD.hf), SCALAR_HEAD.hf
    if has_head and spec.head == "lm":
        raise ValueError(
            f"{source.place(name)}: with {name} these are a reward model's adapters, not a"
            " language model's: give others"
        )
    head = dict(SCALAR_HEAD.tensors(spec, "")) if has_head else {}
    source.check(adapter_shapes(spec) | head)


def trained_tensors(
    chunks: Sequence["ModelChunk"], spec: ModelSpec
) -> Iterator[tuple[str, Tensor]]:
    """Adapters' tensors, and a scalar head, of all chunks of a model on one rank."""
    return ((name, tensor) for name, tensor in _tensors(chunks, spec) if is_moved(spec, name))


def _fill(
    parameters: Sequence[tuple[Parameter, Tensor]],
    spec: ModelSpec,
    source: WeightSource,
    went_on: Callable[[], None],
) -> None:
    places, ends = file_places(spec), []

    def read(name: str, _shape: Shape, box: Box) -> Tensor:
        place = places[name]
        return source.read(place.tensor, place.shape, place.box(box))

    for parameter, value in parameters:
        fill(value, parameter, read)
        ends += torch.aminmax(value.detach())  # propagates NaN
        went_on()
    if ends and not torch.stack(ends).isfinite().all():
        _raise_not_finite(parameters, source, places)


def _raise_not_finite(
    parameters: Sequence[tuple[Parameter, Tensor]],
    source: WeightSource,
    places: Mapping[str, FilePlace],
) -> None:
    """Raise ValueError with the first tensor that is not finite."""
    for parameter, value in parameters:
        for piece in parameter.pieces:
            if not value[slices(piece.place)].isfinite().all():
                tensor = places[piece.tensor].tensor
                raise ValueError(
                    f"{source.place(tensor)}: tensor {tensor} holds NaN or infinity, or"
                    " what is too large for engine.dtype: give a model's whole weights"
                )


def _check_tied(parameters: Sequence[tuple[Parameter, Tensor]], source: WeightSource) -> None:
    """Raise ValueError if a tied model's saved output embeddings differ from its input embeddings.

    Whether to tie them is then unclear: transformers would not.
    """
    (name,) = HEAD.hf
    for parameter, value in parameters:
        for piece in parameter.pieces if parameter.tensors[0][0] in EMBEDDING.hf else ():
            embedding = value[slices(piece.place)]
            saved = source.read(name, parameter.tensors[0][1], piece.box)
            if not torch.equal(embedding, saved.to(embedding)):
                raise ValueError(
                    f"{source.place(name)}: tensor {name} is not {piece.tensor}, and config.json"
                    " ties the two: set tie_word_embeddings=false there, or leave the tensor out"
                )


def export_hf(
    chunks: Sequence["ModelChunk"],
    spec: ModelSpec,
    directory: str | Path,
    dtype: str,
    max_shard_bytes: int = 5_000_000_000,
) -> None:
    """Write ``config.json`` and safetensors (sharded, with an index, if large) for transformers.

    Args:
        chunks: all chunks of the model, on one pipeline and tensor rank.
        directory: created if absent; the caller adds tokenizer files.
        dtype: of the files, ``fp32`` or ``bf16``.
        max_shard_bytes: most bytes in a file, unless a single tensor has more.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    shards = _shards(hf_shapes(spec), BYTES_PER_PARAMETER[dtype], max_shard_bytes)
    tensors = _file_tensors(chunks, spec)  # with adapters: merged into what they adapt
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
        total = num_parameters(spec) * BYTES_PER_PARAMETER[dtype]
        index = {"metadata": {"total_size": total}, "weight_map": files}
        (directory / INDEX_NAME).write_text(json.dumps(index, indent=2))
    config = {**to_hf_config(spec), "torch_dtype": str(DTYPES[dtype]).removeprefix("torch.")}
    (directory / "config.json").write_text(json.dumps(config, indent=2))


def _file_tensors(chunks: Sequence["ModelChunk"], spec: ModelSpec) -> Iterator[tuple[str, Tensor]]:
    """Tensors of the files, in file order."""
    places = file_places(without_adapters(spec))
    in_order = groupby(_merged(chunks, spec), key=lambda tensor: places[tensor[0]].tensor)
    for name, group in in_order:
        parts = [tensor for _, tensor in group]
        yield name, parts[0] if len(parts) == 1 else torch.cat(parts)


def _merged(chunks: Sequence["ModelChunk"], spec: ModelSpec) -> Iterator[tuple[str, Tensor]]:
    """The base's tensors, with what their adapters add to them."""
    if spec.lora is None:
        yield from _tensors(chunks, spec)
        return
    adapters = {n: t.detach().float() for n, t in trained_tensors(chunks, spec)}
    for name, tensor in _tensors(chunks, spec):
        stem = name.removesuffix(".weight")
        a, b = (adapters.get(f"{stem}.lora_{letter}.weight") for letter in "AB")
        if a is not None and b is not None:
            yield name, tensor.detach().float() + spec.lora.scaling * (b @ a)
        elif name not in adapters or name in SCALAR_HEAD.hf:
            yield name, tensor


def _tensors(chunks: Sequence["ModelChunk"], spec: ModelSpec) -> Iterator[tuple[str, Tensor]]:
    """Tensors of the model in file order, made from their parameters one by one."""
    owners: dict[str, tuple[Tensor, Parameter]] = {}
    for chunk in chunks:
        assert chunk.pg_collection.tp.size() == 1, "export needs one tensor rank"
        for parameter, value in parameters_of(chunk, spec):
            owner = value, parameter
            owners |= {name: owner for name, _ in parameter.tensors if name not in owners}
    done: set[str] = set()
    for name in tensor_shapes(spec):
        if name not in done:
            for made in take_apart(*owners[name]):
                done.add(made[0])
                yield made


def _shards(shapes: dict[str, Shape], item_bytes: int, max_bytes: int) -> list[list[str]]:
    """Distribute tensors over files, greedily and in order; names by file."""
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
