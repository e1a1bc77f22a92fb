"""The most tiles that an image processor may cut an image into, by the name that the processor has for it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dhp.base.errors import ConfigError

if TYPE_CHECKING:
    from transformers.image_processing_utils import BaseImageProcessor

# Its name, and a second setting that only processors have which mean tiles by it; None: the name is unambiguous.
_NAMES = (("max_image_tiles", None), ("max_slice_nums", None), ("max_patches", "crop_to_patches"))
_LEAST = "min_patches"


def tile_arguments(processor: BaseImageProcessor, max_tiles: int | None) -> dict[str, Any]:
    """Arguments of the processor; none for None. Raises ConfigError for one that cuts no tiles, or asks for more."""
    if max_tiles is None:
        return {}
    known, kind = processor.valid_kwargs.__annotations__, type(processor).__name__
    name = next((name for name, beside in _NAMES if name in known and (beside is None or beside in known)), None)
    if name is None:
        raise ConfigError(
            f"data.max_tiles={max_tiles}, but {kind} has no setting of how many tiles an image is cut into. Leave it "
            "unset (null); data.max_pixels bounds images that are scaled by area"
        )
    least = getattr(processor, _LEAST, None) or 1
    if max_tiles < least:
        raise ConfigError(f"data.max_tiles={max_tiles} < {_LEAST}={least} of {kind}. Set at least {least}")
    return {name: max_tiles}
