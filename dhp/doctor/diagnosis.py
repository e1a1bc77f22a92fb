"""The doctor's diagnosis of a model: as data, as a table, as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

EXACT = 1e-9  # the largest deviation, relative, at which parts and packed rows count as equal to the whole


@dataclass(frozen=True)
class Diagnosis:
    """The diagnosis of one configuration.

    split_error, packed_error: the largest relative deviation of a tiny model's loss and gradients, trained in its
    parts, from the whole model's: with rows padded, and with samples packed into one row. None: it could not be run.

    vision, text, audio: layouts that each part has; audio is empty for a model without such a part. refused: why not,
    by layout.
    """

    family: str
    trainable: bool
    split_error: float | None
    packed_error: float | None
    vision: tuple[str, ...]
    text: tuple[str, ...]
    refused: dict[str, str]
    audio: tuple[str, ...] = ()

    def as_json(self) -> str:
        """One object on one line; of a model without an audio part, without that key."""
        fields = asdict(self)
        return json.dumps(fields if self.audio else {key: value for key, value in fields.items() if key != "audio"})

    def as_table(self) -> str:
        """Aligned lines for the terminal."""
        rows = [
            ("family", self.family),
            ("trainable", "yes" if self.trainable else "no"),
            ("in 3 parts" if self.audio else "in two parts", _deviation(self.split_error)),
            ("packed rows", _deviation(self.packed_error)),
            ("vision", ", ".join(self.vision) or "none of the layouts"),
            *([("audio", ", ".join(self.audio))] if self.audio else []),
            ("text", ", ".join(self.text) or "none of the layouts"),
        ]
        lines = [f"{name:14}{value}" for name, value in rows]
        if self.refused:
            lines.append("refused")
            lines += [f"  {layout}: {why}" for layout, why in self.refused.items()]
        return "\n".join(lines)


def _deviation(error: float | None) -> str:
    if error is None:
        return "not tried"
    equal = "equal to" if error <= EXACT else "differ from"
    return f"{equal} the whole model: largest deviation of loss and gradients {error:.1e}"
