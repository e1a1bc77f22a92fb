"""Which parameters are matrices of hidden layers, by their names and shapes: those that Muon orthogonalizes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dhp.core.parameters import is_inside
from dhp.models.family import Family

_WEIGHT = "weight"  # at the end of a matrix's name: Gemma 3's projection has it behind an underscore
_EMBEDS = "embed"  # in the name of what embeds tokens, patches or positions


def hidden_matrices(shapes: Mapping[str, Sequence[int]], family: Family) -> frozenset[str]:
    """Names of the matrices among parameters of these shapes: weights with two axes of a part's layers, and outside of
    them of all that neither embeds nor is the head. A stack of experts' matrices has three axes."""
    paths = [part.layers.path for part in family.parts.values()]
    matrices = (name for name, shape in shapes.items() if len(shape) == 2 and name.endswith(_WEIGHT))
    return frozenset(name for name in matrices if is_inside(name, paths) or not _is_end(name, family))


def _is_end(name: str, family: Family) -> bool:
    return _EMBEDS in name or is_inside(name, (family.decoder.embedding, family.decoder.head))
