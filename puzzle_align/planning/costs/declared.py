"""Profiles of devices from the figures of their data sheets, for planning without measurements.

Times follow a roofline: a kernel takes the time of its FLOPs at the device's practical rate, or the
time of its bytes at its memory's rate, whichever is longer; a layer also takes a fixed time for its
launches. Such times suffice to compare plans on paper; reports name them declared.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from puzzle_align.layout.flops import backward_of_matrices, flops_per_token, head_flops_per_token
from puzzle_align.layout.model import (
    LORA_TARGETS,
    Dtype,
    ModelOptions,
    ModelSpec,
    padded_vocab_size,
    without_adapters,
)
from puzzle_align.layout.plan import ParallelPlan
from puzzle_align.planning.costs.profile import (
    DecodePoint,
    EndPoint,
    Hardware,
    Link,
    LinkPoint,
    MergePoint,
    ModelProfile,
    OptimizerPoint,
    PrefillPoint,
    Profile,
    RowPoint,
    Time,
)
from puzzle_align.planning.memory.model import layer_kept_bytes, layer_shard_parameters

# Bytes a parameter that an optimizer step reads and writes, by the dtype of its state.
_STEP_BYTES = {"fp32": 28, "bf16": 20}
_STATE_BYTES = {"fp32": 12, "bf16": 6}  # that ``cpu_offload`` brings to the device, and back
# Bytes a parameter of merged adapters: it is copied to float32, the product of the adapters is
# made, scaled and added, and the sum rounded to bf16.
_MERGE_BYTES = 6 + 4 + 8 + 12 + 6
OPTIONS = ModelOptions(dtype="bf16", attention="flex", transformer_impl="te")


@dataclass(frozen=True, kw_only=True)
class Device:
    """A device's practical FLOP/s and bytes/s, and its bytes of memory."""

    name: str
    flops: float
    bandwidth: float
    memory_bytes: int
    launch: float = 60e-6  # seconds of a layer's kernel launches
    host_bandwidth: float = 50e9  # bytes/s from and to host memory


# 55% of the data sheet's dense bf16 FLOP/s, 80% of its memory's bytes/s.
DEVICES = {
    name: Device(
        name=name,
        flops=0.55 * flops,
        bandwidth=0.8 * bandwidth,
        memory_bytes=gibibytes * 2**30,
        host_bandwidth=host,
    )
    for name, flops, bandwidth, gibibytes, host in (
        ("a100-sxm", 312e12, 2.04e12, 79, 25e9),
        ("a100-pcie", 312e12, 1.94e12, 79, 25e9),
        ("h100", 989e12, 3.35e12, 79, 50e9),
        ("h200", 989e12, 4.8e12, 139, 50e9),
    )
}


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes with declared times: tensor sizes, tokens of rows, batches that generate."""

    tensors: tuple[int, ...] = (1, 2, 4, 8)
    rows: tuple[int, ...] = (1024, 2048, 4096)
    batches: tuple[int, ...] = (1, 8, 32, 128, 512)
    contexts: tuple[int, ...] = (128, 512, 2048)
    recomputes: tuple[str, ...] = ("none", "full")


def declared_profile(
    models: Iterable[ModelSpec],
    device: Device,
    links: Iterable[Link],
    *,
    ranks_per_node: int = 8,
    sizes: Sizes | None = None,
    options: ModelOptions = OPTIONS,
    optimizers: Mapping[ModelSpec, Iterable[tuple[Dtype, bool]]] | None = None,
) -> Profile:
    """Declare the profile of a device.

    Args:
        optimizers: ``state_dtype`` and ``cpu_offload`` of each trained model's optimizers; None:
            float32 on the device, for every model.
    """
    sizes = sizes or Sizes()
    models = tuple(dict.fromkeys(models))
    if optimizers is None:
        optimizers = dict.fromkeys(models, (("fp32", False),))
    return Profile(
        hardware=Hardware(
            device="cuda",
            name=f"{device.name}, declared",
            memory_bytes=device.memory_bytes,
            ranks_per_node=ranks_per_node,
            versions={},
        ),
        options=options,
        models=tuple(
            replace(
                _model(model, device, options, sizes),
                optimizer=tuple(
                    step for kind in optimizers.get(model, ()) for step in _steps(device, *kind)
                ),
            )
            for model in models
        ),
        links=(*links, _copies(device)),
    )


def _copies(device: Device) -> Link:
    """Copies within the device's memory, each byte of which is read and written."""
    points = tuple(
        LinkPoint(size=size, time=Time(median=2 * size / device.bandwidth))
        for size in (2**12, 2**30)
    )
    return Link(transport="copy", place="node", ranks=1, points=points, declared=device.name)


def _steps(device: Device, state_dtype: Dtype, cpu_offload: bool) -> Iterator[OptimizerPoint]:
    for number in (10**6, 10**9):
        seconds = 1e-3 + _STEP_BYTES[state_dtype] * number / device.bandwidth
        if cpu_offload:
            seconds += 2 * _STATE_BYTES[state_dtype] * number / device.host_bandwidth
        yield OptimizerPoint(
            parameters=number,
            step=Time(median=seconds),
            state_dtype=state_dtype,
            cpu_offload=cpu_offload,
        )


def _model(model: ModelSpec, device: Device, options: ModelOptions, sizes: Sizes) -> ModelProfile:
    tensors = [
        tensor
        for tensor in sizes.tensors
        if model.num_attention_heads % tensor == 0 and model.num_key_value_heads % tensor == 0
    ]
    rows = [
        point
        for tensor in tensors
        for tokens in sizes.rows
        for recompute in sizes.recomputes
        for point in _rows(model, device, replace(options, recompute=recompute), tensor, tokens)
    ]
    ends = [
        _ends(model, device, tensor, tokens, predictions)
        for tensor in tensors
        for tokens in sizes.rows
        for predictions in (tokens // 8, tokens)
    ]
    decode, prefill, merge = [], [], []
    if model.lora is not None:
        merge = [
            MergePoint(parameters=n, time=Time(median=_MERGE_BYTES * n / device.bandwidth))
            for n in (10**6, 10**9)
        ]
    if model.head == "lm":
        for tensor in tensors:
            prefill += [
                PrefillPoint(
                    tensor=tensor,
                    sequences=max(1, tokens // 256),
                    tokens=tokens,
                    layer=Time(median=_layer(model, device, tensor, tokens, 128)),
                    rest=_rest(model, device, tensor, max(1, tokens // 256)),
                )
                for tokens in sizes.rows
            ]
            decode += [
                DecodePoint(
                    tensor=tensor,
                    sequences=batch,
                    context=context,
                    layer=Time(median=_decoded(model, device, tensor, batch, context)),
                    rest=_rest(model, device, tensor, batch),
                )
                for batch in sizes.batches
                for context in sizes.contexts
            ]
    return ModelProfile(
        model=model,
        rows=tuple(rows),
        ends=tuple(ends),
        prefill=tuple(prefill),
        decode=tuple(decode),
        merge=tuple(merge),
    )


def _rows(
    model: ModelSpec, device: Device, options: ModelOptions, tensor: int, tokens: int
) -> list[RowPoint]:
    plan = ParallelPlan(tensor=tensor)
    kept = layer_kept_bytes(model, plan, options, tokens)
    points = []
    for each in (128.0, tokens / 2):
        forward = _layer(model, device, tensor, tokens, each)
        matrices = _layer(model, device, tensor, tokens, 0.0)
        backward = 2 * forward
        if model.lora is not None:  # the gradients of frozen matrices are not computed
            backward -= matrices
        again = {"none": 0.0, "selective": forward - matrices, "full": forward}[options.recompute]
        points.append(
            RowPoint(
                tensor=tensor,
                recompute=options.recompute,
                row_tokens=tokens,
                pairs=round(each * tokens),
                forward=Time(median=forward),
                train_forward=Time(median=forward),
                backward=Time(median=backward + again),
                kept_bytes=kept,
            )
        )
    return points


def _layer(model: ModelSpec, device: Device, tensor: int, tokens: float, pairs: float) -> float:
    """Seconds of one layer's forward of ``tokens``, each of which sees ``pairs`` others."""
    width = model.num_attention_heads * model.head_dim
    flops = tokens * (flops_per_token(model) / model.num_hidden_layers + 4 * width * pairs)
    weights = 2 * layer_shard_parameters(without_adapters(model), 1) / tensor
    # Adapters of all linear layers are about as many kernels as the layer without them.
    adapted = len(model.lora.target_modules) / len(LORA_TARGETS) if model.lora is not None else 0.0
    launches = (1 + adapted) * device.launch
    return max(flops / tensor / device.flops, weights / device.bandwidth) + launches


def _decoded(model: ModelSpec, device: Device, tensor: int, sequences: int, context: int) -> float:
    keys = 2 * 2 * model.num_key_value_heads * model.head_dim * context * sequences / tensor
    seconds = _layer(model, device, tensor, sequences, context)
    return seconds + keys / device.bandwidth


def _rest(model: ModelSpec, device: Device, tensor: int, sequences: int) -> Time:
    """Head and sampling of a batch."""
    table = 2 * padded_vocab_size(model) * model.hidden_size / tensor
    logits = 28 * padded_vocab_size(model) * sequences
    return Time(median=(table + logits) / device.bandwidth + 5 * device.launch)


def _ends(model: ModelSpec, device: Device, tensor: int, tokens: int, predictions: int) -> EndPoint:
    flops = head_flops_per_token(model) * predictions / tensor
    head = flops / device.flops + device.launch
    embedding = 2 * tokens * model.hidden_size * 2 / device.bandwidth + device.launch
    return EndPoint(
        tensor=tensor,
        row_tokens=tokens,
        predictions=predictions,
        prepare=Time(median=1e-3),
        embedding_forward=Time(median=embedding),
        embedding_backward=Time(median=2 * embedding if model.lora is None else 0.0),
        head_forward=Time(median=head),
        head_train_forward=Time(median=head),
        head_backward=Time(median=(1 + backward_of_matrices(model)) * head),
    )
