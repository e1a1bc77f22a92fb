"""A video too long for one process, whose patches stay in its file."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from dhp.base.geometry import Grid
from dhp.data.media.sources import PLAIN, File, Settings
from dhp.data.media.taking import VideoLength


@dataclass(frozen=True)
class LongVideo:
    """A video whose frames are read later, instead of pixels: `dhp.data.pictures.Pictures.read_patches` reads some of
    its patches."""

    file: File
    length: VideoLength
    grid: Grid
    settings: Settings = PLAIN

    def __len__(self) -> int:
        """Patches."""
        return prod(self.grid)
