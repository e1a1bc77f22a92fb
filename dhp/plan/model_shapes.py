"""What is counted of a model for a run's graph: where it is counted once for many runs, a plan gives it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from dhp.core.parameters import AdapterSettings
from dhp.models.family import Family
from dhp.models.shape import DecoderSizes, Parameter


class Shapes(Protocol):
    """What is counted of a model. sizes: of its decoder's pieces; parameters: all, those of adapters among them."""

    @property
    def sizes(self) -> DecoderSizes: ...

    @property
    def parameters(self) -> Sequence[Parameter]: ...


@dataclass(frozen=True)
class ModelShapes:
    """`Shapes` of the model of `source`, each counted when it is asked for. family: with the parts of the run."""

    family: Family
    source: str
    adapters: Mapping[str, AdapterSettings]

    @cached_property
    def sizes(self) -> DecoderSizes:
        from dhp.models.empty import decoder_sizes  # imports modeling code, which takes a second

        return decoder_sizes(self.source)

    @cached_property
    def parameters(self) -> Sequence[Parameter]:
        from dhp.models.empty import list_parameters

        return list_parameters(self.source, self.family, self.adapters)
