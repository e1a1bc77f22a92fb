"""How samples are read, beyond what the model's processors say."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ReadSettings:
    """See `dhp.config.schema.DataConfig`.

    max_tokens: of a sample; None: no bound. video_max_pixels: area of a frame; None: as of an image. chat_template:
    Jinja text; None: the model's own. whole_frames: videos of more frames are read in parts; None: none are. max_tiles:
    of an image; None: the model's own.
    """

    allow_http: bool = False
    max_tokens: int | None = None
    video_fps: float = 2.0
    video_max_frames: int = 768
    video_max_pixels: int | None = None
    system_prompt: str | None = None
    chat_template: str | None = None
    learn_empty_thoughts: bool = False
    whole_frames: int | None = None
    max_tiles: int | None = None
