"""Limits of a sample's length: the user's, and the positions that the model supports."""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

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


def longest_token(backend: Mapping[str, Any]) -> int | None:
    """The most characters that one token can stand for, of a text in normal form C; None where nothing bounds them.

    backend: a fast tokenizer as JSON. A bound is known of byte pairs whose bytes are all tokens; not where unknown
    words are one token, where text is taken away before, or where a token takes the space around it along.
    """
    model, added = backend["model"], backend.get("added_tokens") or []
    steps = [*_steps(backend.get("normalizer")), *_steps(backend.get("pre_tokenizer"))]
    kinds = {step["type"] for step in steps}
    of_bytes = "ByteLevel" in kinds or bool(model.get("byte_fallback"))
    if (
        model["type"] != "BPE"
        or not of_bytes
        or not kinds <= {"NFC", "ByteLevel", "Split", "Digits", "Metaspace", *_SAME}
    ):
        return None
    if any(step.get("behavior") == "Removed" or not _keeps(step) for step in steps):
        return None
    if any(token["lstrip"] or token["rstrip"] for token in added):
        return None
    return max(map(len, [*model["vocab"], *(token["content"] for token in added)]))


def check_characters(
    text: str, pictures: int, longest: int | None, max_tokens: int | None, positions: PositionRange | None
) -> None:
    """Raises DataError for a text that cannot fit, however it is cut into tokens: to cut one takes 300 times its size
    in memory. pictures: that have a placeholder each in the text so far. longest: see `longest_token`."""
    most = min((bound for bound in (max_tokens, positions and positions.count) if bound is not None), default=None)
    if longest is None or most is None:
        return
    room = longest * most + pictures * max(longest, _PLACEHOLDER)
    if len(text) > room and not unicodedata.is_normalized("NFC", text):
        text = unicodedata.normalize("NFC", text)
    if len(text) > room:
        key = "data.max_tokens" if most == max_tokens else "the positions that the model knows"
        raise DataError(
            f"{len(text)} characters are more than {most} tokens ({key}) can hold, of which the longest has {longest}. "
            "Shorten the sample, or leave it out by data.on_bad_sample=skip"
        )


_PLACEHOLDER = 64  # characters that a template may write for a picture, and that a processor may replace by one token
_SAME = ("Prepend", "Replace")  # steps that may leave as many characters as there were


def _steps(step: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    if step is None:
        return []
    if step["type"] != "Sequence":
        return [step]
    return [one for inner in (step.get("normalizers") or step.get("pretokenizers") or []) for one in _steps(inner)]


def _keeps(step: Mapping[str, Any]) -> bool:
    """Whether a step takes no character away."""
    return step["type"] != "Replace" or len(step["content"]) >= len(
        step["pattern"].get("String", step["content"] + " ")
    )
