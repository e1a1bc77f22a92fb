"""Bounds of a scaled picture's area, as arguments of an image processor."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dhp.core.errors import ConfigError

if TYPE_CHECKING:
    from transformers.image_processing_utils import BaseImageProcessor


def area_bounds(
    processor: BaseImageProcessor,
    min_pixels: int | None,
    max_pixels: int | None,
    upper: str = "data.max_pixels",
) -> dict[str, Any]:
    """Arguments of the image processor that bound a scaled image's area; none leaves it its own bounds."""
    if min_pixels is None and max_pixels is None:
        return {}
    if "min_pixels" not in processor.valid_kwargs.__annotations__:
        raise ConfigError(
            f"data.min_pixels = {min_pixels}, {upper} = {max_pixels}, but {type(processor).__name__} does "
            "not scale images by area. Leave both unset (null)"
        )
    # Processors that scale by area nevertheless call the two bounds "edges".
    shortest = processor.size["shortest_edge"] if min_pixels is None else min_pixels
    longest = processor.size["longest_edge"] if max_pixels is None else max_pixels
    if not 0 < shortest <= longest:
        raise ConfigError(
            f"images need 0 < data.min_pixels <= {upper}, got {shortest} and {longest} "
            "(the image processor's own value where unset)"
        )
    return {"size": {"shortest_edge": shortest, "longest_edge": longest}}
