"""Videos of families whose towers take frames as they take pictures."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from inspect import signature
from typing import Any

import numpy as np
from PIL import Image
from transformers.image_processing_backends import PilBackend

from dhp.core.batch import ProcessorOutput
from dhp.models.contract.random_pictures import brief

PIXELS, MOVING = "pixel_values", "pixel_values_videos"
_COUNTS = "num_frames_per_video"
_KNOWN = frozenset({MOVING, "video_position_ids", _COUNTS})
_CHOICES = ("vision_feature_layer", "vision_feature_select_strategy", "kwargs", "self")

Frame = Mapping[str, np.ndarray]  # what an image processor gives for one frame


def video_arguments(base: Any) -> frozenset[str] | None:
    """Arguments of a class's `get_video_features`; None where it has none, or takes others than frames."""
    encode = getattr(base, "get_video_features", None)
    asked = frozenset() if encode is None else frozenset(signature(encode).parameters) - {*_CHOICES}
    return asked if asked and asked <= _KNOWN else None


def is_video(form: ProcessorOutput) -> bool:
    """Whether the encoder has a function of its own for it."""
    return any(name == MOVING for name, _ in form.pixels)


def stack(frame: Frame, count: int, asked: Collection[str]) -> dict[str, np.ndarray]:
    """Arguments of the encoder for a video of `count` frames like this one, which takes their room alone. asked: names
    of its arguments."""
    moving, found = MOVING in asked, dict[str, np.ndarray]()
    for name, value in frame.items():
        renamed = name.replace("image_", "video_").replace(PIXELS, MOVING) if moving else name
        if renamed not in asked:
            continue
        one = np.asarray(value)
        if moving and _COUNTS not in asked:
            one = one[None]  # a video is a row of frames
        along = 1 if one.ndim > np.asarray(frame[PIXELS]).ndim or np.asarray(frame[PIXELS]).ndim == 5 else 0
        found[renamed] = np.broadcast_to(one, (*one.shape[:along], count, *one.shape[along + 1 :]))
    return found | ({_COUNTS: np.array([count])} if _COUNTS in asked else {})


def pack_frames(
    frames: Sequence[Frame], count: int, asked: Collection[str], tokens: int, values: int, written: str = ""
) -> tuple[np.ndarray, ProcessorOutput]:
    """A video as rows [rows, values], float32, and its form. frames: all `count` of them, or the first, for the form
    alone."""
    whole = stack(frames[0], count, asked)
    ((name, pixels),) = ((name, array) for name, array in whole.items() if array.dtype.kind == "f")
    others = tuple((n, str(array.dtype), array.shape, brief(array)) for n, array in whole.items() if n != name)
    form = ProcessorOutput(((name, pixels.shape),), others, -(-pixels.size // values), tokens, written)
    flat = np.concatenate([np.asarray(frame[PIXELS], np.float32).reshape(-1) for frame in frames])
    rows = np.zeros((-(-len(flat) // values), values), np.float32)
    rows.reshape(-1)[: len(flat)] = flat
    return rows, form


def frame_maker(
    library: Any, settings: Mapping[str, Any], asked: Collection[str], arguments: Mapping[str, Any]
) -> Callable[[Image.Image], Frame]:
    """A function from a frame to its numbers, as a video processor of these settings has them: scaled, cut and
    normalised alone, or, where the encoder takes more of a frame than that, by the family's image processor, which then
    cuts no tiles. library: the family's processor. arguments: of its image processor."""
    if not {name for name in asked if name.startswith(("pixel_", "video_"))} - {PIXELS, MOVING}:
        return partial(_numbers, PilBackend(**settings), {})
    pictures = library.image_processor
    own = {name: settings[name] for name in pictures.valid_kwargs.__annotations__ if settings.get(name) is not None}
    size = (settings.get("video_sampling") or {}).get("video_size")
    whole = {"do_image_splitting": False} if hasattr(pictures, "do_image_splitting") else {}
    return partial(_numbers, pictures, {**arguments, **own, **({"size": size} if size else {}), **whole})


def _numbers(pictures: Any, arguments: Mapping[str, Any], frame: Image.Image) -> Frame:
    found: Frame = pictures(images=[frame], return_tensors="np", **arguments)
    return found


_KEPT_BLANKS = 8  # sizes whose blank frames stay in memory


@dataclass
class WholeVideos:
    """Videos of one model's directory.

    mark: what a chat template writes in a video's place. tokens: that stand for rows of a frame.

    frame: the numbers of one frame. write: the prompt's text in the place of a video, of what the library's processor
    looks at. asked: see `stack`. values: numbers in a row.

    rule: by which frames are chosen (`dhp.data.media.frames.FrameSampling`). fps, most: of its video processor, frames
    a second and in all; None: it does not say. settings: all that its file says."""

    mark: str
    tokens: tuple[str, ...]
    frame: Callable[[Image.Image], Frame]
    write: Callable[[dict[str, Any]], str]
    asked: Collection[str]
    values: int
    rule: str
    settings: Mapping[str, Any]
    _blank: dict[tuple[int, int], Frame] = field(default_factory=dict)

    @property
    def fps(self) -> float | None:
        return self._sampling("fps")

    @property
    def most(self) -> int | None:
        found = self._sampling("num_frames", "max_frames")
        return None if found is None else int(found)

    def _sampling(self, *names: str) -> float | None:
        sections = (self.settings.get("video_sampling") or {}, self.settings)
        return next((one[name] for one in sections for name in names if one.get(name)), None)

    def video(self, frames: Sequence[Frame], pace: Any) -> tuple[np.ndarray, ProcessorOutput]:
        """Frames with their times (`dhp.data.media.frames.FrameTimes`) as rows [rows, values], and their form."""
        from transformers.video_utils import VideoMetadata

        times, first = list(pace.firsts), frames[0]
        pixels = np.asarray(first[PIXELS])
        shown = np.broadcast_to(pixels.reshape(pixels.shape[-3:]), (1, len(times), *pixels.shape[-3:]))
        about = VideoMetadata(len(times), fps=1.0, duration=pace.whole, frames_indices=times)  # a frame a second
        seen = {name.replace("per_image", "per_video"): value for name, value in first.items()}
        written = self.write({**seen, PIXELS: shown, MOVING: shown, "video_metadata": [about]})
        tokens = sum(written.count(token) for token in self.tokens)
        return pack_frames(frames, len(times), self.asked, tokens, self.values, written)

    def outline(self, size: tuple[int, int], pace: Any) -> ProcessorOutput:
        """The form of a video of frames of that size."""
        if size not in self._blank:
            if len(self._blank) >= _KEPT_BLANKS:
                self._blank.clear()
            self._blank[size] = self.frame(Image.new("RGB", size))
        return self.video([self._blank[size]], pace)[1]

    def about(self) -> list[Any]:
        """All that decides a video's tokens, except its file and the model's processor."""
        return [self.mark, *self.tokens, self.rule, sorted(map(repr, self.settings.items()))]
