"""How long a sample may be: what the user allows, and the positions that the model knows."""

from __future__ import annotations

from dataclasses import dataclass

from dhp.base.errors import DataError
from dhp.base.geometry import PositionRange


@dataclass(frozen=True)
class Length:
    """Tokens of a sample. vision: those of its pictures; text: all that the decoder sees, those included."""

    vision: int
    text: int


def check_length(length: Length, max_tokens: int | None, positions: PositionRange | None) -> None:
    """Raises DataError for a sample that is too long. Nothing is ever cut: a picture with a part of its tokens would be
    another picture. max_tokens, positions: None: no bound."""
    if max_tokens is not None and length.text > max_tokens:
        raise DataError(
            f"{length.text} tokens ({length.vision} of images and videos) are more than data.max_tokens={max_tokens}. "
            "Lower data.max_pixels, shorten the sample or raise data.max_tokens"
        )
    if positions is None:
        return
    taken = length.text if positions.of_pictures else length.text - length.vision
    if taken > positions.count:
        apart = "" if positions.of_pictures else f" beside {length.vision} of images and videos"
        raise DataError(
            f"{taken} tokens{apart} are more than the {positions.count} positions that the model knows "
            "(max_position_embeddings, as its rope_parameters stretch it). Shorten the sample, leave it out by "
            f"data.max_tokens={positions.count} with data.on_bad_sample=skip, or extend the model in its config.json: "
            "a larger max_position_embeddings, with a larger rope_theta or yarn"
        )
