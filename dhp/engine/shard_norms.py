"""Where the norms of a part are sharded over the sequence: from a chunk's first layer to its end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn

from dhp.models.decoder import Decoder
from dhp.models.load import ReadPlan
from dhp.models.part import Part
from dhp.models.tower import Tower
from dhp.models.types import Chunk
from dhp.parallel.tensor.plan import local_plan
from dhp.parallel.tensor.sequence_norms import SequenceNorms
from dhp.parallel.tensor.sequence_shares import TensorRanks


def shard_decoder(model: nn.Module, decoder: Decoder, chunks: Sequence[Chunk], ranks: TensorRanks) -> SequenceNorms:
    """Shard the layers of these chunks of a decoder, whose projections are cut, and the norm behind the last one."""
    norms, layers = SequenceNorms(ranks), _held(model, decoder.layers.path, chunks)
    norms.install(list(layers.values()))
    for chunk in chunks:
        norms.begin_at(layers[chunk.layers[0]])
        behind = chunk.last and bool(decoder.norm)
        norms.end_at(model.get_submodule(decoder.norm) if behind else layers[chunk.layers[-1]], behind)
    return norms


def shard_tower(model: nn.Module, tower: Tower, chunk: Chunk, ranks: TensorRanks) -> None:
    """Shard the layers of a chunk of a tower, whose projections are cut. What else the tower has, as mergers of inner
    layers' features, is given whole states."""
    norms, layers = SequenceNorms(ranks), _held(model, tower.layers.path, (chunk,))
    norms.install(list(layers.values()))
    holder, _, own = tower.layers.path.rpartition(".")
    for name, child in model.get_submodule(holder).named_children():
        if name != own:
            for module in child if isinstance(child, nn.ModuleList) else (child,):
                norms.whole_for(module)
    norms.begin_at(layers[chunk.layers[0]])
    norms.end_at(layers[chunk.layers[-1]], False)


def check_norms(part: Part, tensor: int) -> ReadPlan:
    """What reads a tensor-parallel plan as `local_plan` does, and raises ModelError where the part's layers are not
    known to allow that their states are cut by tokens."""

    def read(model: nn.Module, plan: Mapping[str, str]) -> dict[str, str]:
        ours = local_plan(model, plan)
        shard_without_ranks(model, part, tensor)
        return ours

    return read


def shard_without_ranks(model: nn.Module, part: Part, tensor: int) -> None:
    """The same on the meta device, of all the part's layers."""
    if isinstance(part, Tower):
        shard_tower(model, part, part.whole, TensorRanks(tensor))
    elif isinstance(part, Decoder):
        shard_decoder(model, part, (part.whole,), TensorRanks(tensor))


def _held(model: nn.Module, path: str, chunks: Sequence[Chunk]) -> dict[int, nn.Module]:
    return {at: model.get_submodule(f"{path}.{at}") for chunk in chunks for at in chunk.layers}
