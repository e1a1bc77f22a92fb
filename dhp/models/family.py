"""The interface of a model family, beyond transformers' own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dhp.models.decoder import Decoder
    from dhp.models.processor import Processor
    from dhp.models.tower import Tower
    from dhp.models.types import Part

VISION = "vision"  # the part that every family has besides its decoder


@dataclass(frozen=True)
class Family:
    """One model family, for the checkpoint with this configuration. Nothing in it needs weights or a device.

    processor: a sample's pictures and tokens as the model reads them.

    tower: the part "vision". decoder: the part "text". others: further encoders, by part.

    idle: modules that no part of a run trains: vision's ranks hold them unchanged, so that a checkpoint has all.

    note: for users who train it; "": none."""

    config: Any
    processor: Processor
    tower: Tower
    decoder: Decoder
    others: Mapping[str, Tower] = field(default_factory=dict)
    idle: tuple[str, ...] = ()
    note: str = ""

    @property
    def parts(self) -> dict[str, Part]:
        """All parts by name, in the order of the data flow."""
        return {**self.encoders, "text": self.decoder}

    @property
    def encoders(self) -> dict[str, Tower]:
        """All parts but the decoder."""
        return {VISION: self.tower, **self.others}

    @property
    def values(self) -> dict[str, Any]:
        """The model's configuration, the same wherever the directory that it was read from lies."""
        return {key: value for key, value in self.config.to_dict().items() if key != "_name_or_path"}

    def check_answers(self) -> None:
        """Raises ModelError, by name, for a model that cannot answer prompts here."""
        self.decoder.check_answers()

    def having(self, parts: Iterable[str]) -> Family:
        """The family in a run with these parts alone: the modules of further encoders that it leaves out are idle."""
        kept = {name: part for name, part in self.others.items() if name in set(parts)}
        left_out = tuple(module for name, part in self.others.items() if name not in kept for module in part.modules)
        return replace(self, others=kept, idle=(*self.idle, *left_out))

    def outside(self, part: str) -> tuple[str, ...]:
        """Modules of all other parts, which this one's ranks drop."""
        others = tuple(module for name, other in self.parts.items() if name != part for module in other.modules)
        return others if part == VISION else (*others, *self.idle)
