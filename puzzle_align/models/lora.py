"""Low-rank adapters (LoRA, arXiv:2106.09685) on Megatron's linear layers, local or fused.

An adapter hangs on its linear layer by a forward hook: ``y = W x + scaling * B A dropout(x)``.
Shapes: S tokens in a row (S/T on a rank under sequence parallelism), H hidden, r the adapter's.

Over tensor ranks, the ``[S, r]`` between A and B is what is exchanged:
- outputs are cut (query, key, value, gate, up): A is whole on every rank, B has the rank's rows.
  The backward sums the gradients of ``A x`` over ranks, so A's gradient is complete on each. Under
  sequence parallelism A sees a part of the tokens, and its gradient is partial.
- inputs are cut (the output projections): A has the rank's columns, and ``A x`` is summed over
  ranks. B is whole; under sequence parallelism it sees a part of the tokens.
Partial gradients are summed by Megatron, where a parameter is marked ``sequence_parallel``.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import get_cuda_rng_tracker, model_parallel_cuda_manual_seed
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor, nn

from puzzle_align.layout.model import LoraSpec, ModelSpec
from puzzle_align.layout.weights import layer_parameters
from puzzle_align.models.cpu import engine_device

if TYPE_CHECKING:
    from puzzle_align.models.chunk import ModelChunk


class _Pair(nn.Module):
    """The adapter of one target: ``A`` and ``B`` on this tensor rank."""

    def __init__(
        self, shapes: Sequence[tuple[int, ...]], config: TransformerConfig, *, cuts_inputs: bool
    ) -> None:
        super().__init__()
        kind = {"dtype": config.params_dtype, "device": engine_device()}
        self.A, self.B = (nn.Parameter(torch.empty(shape, **kind)) for shape in shapes)
        cut, whole, dim = (self.A, self.B, 1) if cuts_inputs else (self.B, self.A, 0)
        set_tensor_model_parallel_attributes(cut, is_parallel=True, dim=dim, stride=1)
        whole.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


def seed_dropout(numbers: Sequence[int], tensor_rank: int) -> None:
    """Seed the process's random states, so that what is dropped next depends on ``numbers`` alone.

    Tensor ranks drop the same where they have the same values, and apart where they have not.
    """
    (seed,) = np.random.SeedSequence(numbers).generate_state(1).tolist()
    model_parallel_cuda_manual_seed(seed, tp_rank=tensor_rank, ep_rank=0, etp_rank=0)


@contextmanager
def drawing_nothing() -> Iterator[None]:
    """Keep Megatron from exchanging random states in the block, in which nothing is drawn.

    Under sequence parallelism it does so in every forward, and while a CUDA graph is captured torch
    refuses to read or set them.
    """
    tracker: Any = get_cuda_rng_tracker()
    tracker.fork = nullcontext  # hides the method
    try:
        yield
    finally:
        del tracker.fork


class Adapters(nn.Module):
    """The adapters of an attention, or of an MLP."""

    def __init__(
        self,
        spec: ModelSpec,
        config: TransformerConfig,
        groups: ProcessGroupCollection,
        module: str,
    ) -> None:
        """Build uninitialised adapters of ``self_attention`` or ``mlp``."""
        super().__init__()
        assert spec.lora is not None
        self.lora: LoraSpec = spec.lora
        self.tp_group, self.config = groups.tp, config
        size, rank = groups.tp.size(), groups.tp.rank()
        shapes = {
            parameter.name: parameter.shape for parameter in layer_parameters(spec, size, rank)
        }
        for target in spec.lora.target_modules:
            pair = [shapes.get(f"{module}.lora.{target}.{letter}") for letter in "AB"]
            if pair[0] is not None and pair[1] is not None:
                cuts_inputs = target in ("o_proj", "down_proj")
                made = _Pair([pair[0], pair[1]], config, cuts_inputs=cuts_inputs)
                self.add_module(target, made)

    def pair(self, target: str) -> _Pair | None:
        """A target's adapter; None if it has none."""
        return cast(_Pair | None, getattr(self, target, None))

    def outputs(self, hidden: Tensor, targets: Sequence[str]) -> list[Tensor | None]:
        """Add-ons to outputs that are cut over tensor ranks, ``[S, 1, outputs/T]`` by target.

        ``hidden`` is ``[S, 1, H]``, or ``[S/T, 1, H]`` under sequence parallelism.
        """
        pairs = [self.pair(target) for target in targets]
        low = [
            F.linear(self._dropped(hidden, same=not self.config.sequence_parallel), pair.A)
            for pair in pairs
            if pair is not None
        ]
        if not low:
            return [None] * len(targets)
        together = torch.cat(low, dim=-1)
        if self.config.sequence_parallel:
            together = gather_from_sequence_parallel_region(together, group=self.tp_group)
        else:
            together = copy_to_tensor_model_parallel_region(together, group=self.tp_group)
        parts = iter(together.split(self.lora.r, dim=-1))
        return [
            None if pair is None else F.linear(next(parts), pair.B) * self.lora.scaling
            for pair in pairs
        ]

    def output(self, hidden: Tensor, target: str) -> Tensor | None:
        """Add-on to an output whose inputs ``[S, 1, inputs/T]`` are cut over tensor ranks."""
        pair = self.pair(target)
        if pair is None:
            return None
        low = F.linear(self._dropped(hidden, same=False), pair.A)
        if self.config.sequence_parallel:
            low = reduce_scatter_to_sequence_parallel_region(low, group=self.tp_group)
        else:
            low = reduce_from_tensor_model_parallel_region(low, group=self.tp_group)
        return F.linear(low, pair.B) * self.lora.scaling

    def _dropped(self, hidden: Tensor, *, same: bool) -> Tensor:
        """Apply dropout; ``same``: tensor ranks have the same values, and must drop the same."""
        if not self.training or self.lora.lora_dropout == 0:
            return hidden
        if same or self.tp_group.size() == 1:
            return F.dropout(hidden, self.lora.lora_dropout)
        with get_cuda_rng_tracker().fork():
            return F.dropout(hidden, self.lora.lora_dropout)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict[str, Any]:
        """Megatron's sharded state."""
        assert metadata is not None
        state = self.state_dict(keep_vars=True)
        cut = {n: p for n, p in state.items() if getattr(p, "tensor_model_parallel", False)}
        return make_sharded_tensors_for_checkpoint(
            state,
            prefix,
            {name: parameter.partition_dim for name, parameter in cut.items()},
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=metadata["dp_cp_group"],
        )


def add_adapters(chunk: "ModelChunk", spec: ModelSpec) -> list[Adapters]:
    """Give the chunk's layers the spec's adapters, uninitialised; return them."""
    made: list[Adapters] = []
    if spec.lora is None:
        return made
    groups: Any = chunk.pg_collection
    for layer in chunk.decoder.layers:
        attention, mlp = layer.self_attention, layer.mlp
        of_attention = Adapters(spec, chunk.config, groups, "self_attention")
        of_mlp = Adapters(spec, chunk.config, groups, "mlp")
        attention.add_module("lora", of_attention)
        mlp.add_module("lora", of_mlp)
        made += [of_attention, of_mlp]
        key_value_heads = spec.num_key_value_heads // groups.tp.size()
        query_key_value = partial(_query_key_value, of_attention, key_value_heads)
        attention.linear_qkv.register_forward_hook(query_key_value)
        attention.linear_proj.register_forward_hook(partial(_projected, of_attention, "o_proj"))
        mlp.linear_fc1.register_forward_hook(partial(_gate_up, of_mlp))
        mlp.linear_fc2.register_forward_hook(partial(_projected, of_mlp, "down_proj"))
    return made


Output = tuple[Tensor, Tensor | None]  # of Megatron's linear layers, with a bias that is not added


def _projected(
    adapters: Adapters, target: str, _linear: nn.Module, args: tuple[Tensor, ...], made: Output
) -> Output:
    """Hook of a linear layer whose inputs are cut over tensor ranks."""
    more = adapters.output(args[0], target)
    return made if more is None else (made[0] + more, made[1])


def _gate_up(
    adapters: Adapters, _linear: nn.Module, args: tuple[Tensor, ...], made: Output
) -> Output:
    """Hook of the MLP's first layer: its outputs are the gate's, then ``up``'s."""
    output, bias = made
    parts = adapters.outputs(args[0], ("gate_proj", "up_proj"))
    return _with(output, output.chunk(2, dim=-1), parts), bias


def _query_key_value(
    adapters: Adapters, num_groups: int, _linear: nn.Module, args: tuple[Tensor, ...], made: Output
) -> Output:
    """Hook of attention's first layer: query, key and value of one query group after another."""
    output, bias = made
    flat = adapters.outputs(args[0], ("q_proj", "k_proj", "v_proj"))
    by_group = (num_groups, -1)
    parts = [None if part is None else part.unflatten(-1, by_group) for part in flat]
    groups = output.unflatten(-1, by_group)
    channels = adapters.config.kv_channels
    assert channels is not None
    query = groups.shape[-1] - 2 * channels
    return _with(groups, groups.split([query, channels, channels], -1), parts).flatten(2), bias


def _with(output: Tensor, places: Sequence[Tensor], parts: Sequence[Tensor | None]) -> Tensor:
    """The output, whose ``places`` come one after the other, with what is added to each."""
    if all(part is None for part in parts):
        return output
    filled = [
        torch.zeros_like(place) if part is None else part
        for place, part in zip(places, parts, strict=True)
    ]
    return output + torch.cat(filled, dim=-1)
