"""Turns images and videos into patches, cached features or grids."""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from PIL import Image

from dhp.config.data import DataConfig
from dhp.core.batch import Features, Grid, PositionRange, ProcessorOutput, frame_patches
from dhp.core.errors import ConfigError, DataError, UnreadableVideo
from dhp.data.media.frames import (
    FrameSampling,
    FrameTimes,
    LongVideo,
    VideoLength,
    count_images,
    extent_of_images,
    map_images,
)
from dhp.data.media.images import open_image, read_size
from dhp.data.media.sound import AudioPreprocessing
from dhp.data.media.sources import (
    PLAIN,
    Blob,
    File,
    Frames,
    Picture,
    Settings,
    Video,
    files_of,
    name_of,
    open_media,
    settings_of,
)
from dhp.data.media.video import map_frames, read_extent, read_groups, read_length
from dhp.data.sample.quick_patches import quick_patches
from dhp.data.sample.sample import Grids, Output, Sample, Size, Videos, area_bounds

if TYPE_CHECKING:
    from transformers.image_processing_utils import BaseImageProcessor

Load = Callable[[str], Features | None]
Tokens = Callable[[Grid | ProcessorOutput], int]  # of a picture
# Of a picture, what a sample needs besides its features; no pace: an image.
Seen = tuple[Grid | ProcessorOutput, FrameTimes | None]
FEATURE_FORMAT = 1  # of keys and files, and of how dhp makes patches: raise it when any of them changes
_DECODERS = ("pillow", "av", "transformers")  # the pixels of one file may differ from version to version


class CachedPictures:
    """Looks pictures up. Safe to call from several threads."""

    def __init__(self, tower: str, load: Load, names: Sequence[str], about: Sequence[Any]) -> None:
        """tower: see `dhp.core.batch.FeatureSettings`. load: the features under a key. names: of the tensors that
        leave the tower. about: properties of the model's family that decide the patches of a picture, except its
        image processor."""
        self._tower, self._load, self._names = tower, load, frozenset(names)
        self._about = [*about, *(version(name) for name in _DECODERS)]

    def digest(self, seen: Sequence[Any]) -> str:
        """Hex digest of a preprocessing. seen: all that decides the patches of a picture, except its file."""
        about = json.dumps([list(seen), self._about], sort_keys=True, default=str)
        return hashlib.sha256(about.encode()).hexdigest()

    def look_up(self, medium: Picture, digest: str, tokens: Tokens) -> tuple[Picture, Features, Seen | None]:
        """The picture to decode, with its features' key and None; or its features, and what they are of.

        digest: of the preprocessing. tokens: of a picture. Raises DataError for a file that cannot be read, ConfigError
        where the folder cannot."""
        content, medium = _digest(medium)
        kind = "video" if isinstance(medium, Video) else "image"
        if settings_of(medium) != PLAIN:
            kind = f"{kind} {settings_of(medium)}"
        key = key_of(self._tower, digest, kind, content)
        kept = self._load(key)
        seen = None if kept is None else self._check(kept, tokens)
        return medium, kept if kept is not None and seen is not None else Features(key, ""), seen

    def _check(self, kept: Features, tokens: Tokens) -> Seen | None:
        """None where the features are not those of such a picture: they are computed again."""
        assert kept.tensors is not None
        try:
            seen = seen_from_json(kept.about)
        except (ValueError, KeyError, TypeError):
            return None
        rows = {tensor.shape[:1] for tensor in kept.tensors.values()}
        return seen if kept.tensors.keys() == self._names and rows == {(tokens(seen[0]),)} else None


def seen_to_json(grid: Grid | ProcessorOutput, pace: FrameTimes | None) -> str:
    """As text. Floats are restored exactly."""
    form = grid if isinstance(grid, ProcessorOutput) else None
    arrays = None if form is None else [(*about, raw.hex()) for *about, raw in form.arrays]
    shape = grid if form is None else {**vars(form), "arrays": arrays}
    return json.dumps([shape, None if pace is None else [pace.seconds, pace.times, pace.firsts]])


def seen_from_json(text: str) -> Seen:
    """The inverse of `seen_to_json`. Raises ValueError, KeyError or TypeError for another text."""
    grid, times = json.loads(text)
    pace = None if times is None else FrameTimes(times[0], tuple(times[1]), tuple(times[2]))
    if not isinstance(grid, dict):
        t, h, w = map(int, grid)
        return (t, h, w), pace
    pixels = tuple((name, tuple(shape)) for name, shape in grid["pixels"])
    arrays = tuple((name, dtype, tuple(shape), bytes.fromhex(raw)) for name, dtype, shape, raw in grid["arrays"])
    return ProcessorOutput(pixels, arrays, int(grid["rows"]), int(grid["tokens"]), grid["written"]), pace


def key_of(tower: str, seen: str, kind: str, content: bytes) -> str:
    """Hex digest that a picture's features are cached under.

    tower: see `dhp.core.batch.FeatureSettings`. seen: hex digest of how pictures become patches. kind: image or
    video, and its own settings. content: SHA-256 of the bytes of its file."""
    hashed = json.dumps([FEATURE_FORMAT, tower, seen, kind, content.hex()])
    return hashlib.sha256(hashed.encode()).hexdigest()


def _digest(medium: Picture) -> tuple[bytes, Picture]:
    """SHA-256 of a file's bytes, and the file; an image, or a file that would be fetched again, with these bytes, so
    that the decoded bytes are the digested ones. Videos on disk are too large for that."""
    if isinstance(medium, Video) and isinstance(medium.file, Frames):
        digests = [_digest(file) for file in medium.file.files]
        frames = replace(medium.file, files=tuple(cast(File, file) for _, file in digests))
        whole = b"".join(content for content, _ in digests) + str(frames.rate).encode()
        return hashlib.sha256(whole).digest(), replace(medium, file=frames)
    (file,), video = files_of(medium), isinstance(medium, Video)
    with open_media(file, "video" if video else "image") as opened:
        if video and isinstance(file, Path):
            return hashlib.file_digest(cast(io.BufferedReader, opened), "sha256").digest(), medium
        content = opened.read()
    blob = Blob(name_of(file), content)
    found = blob if isinstance(medium, File) else replace(medium, file=blob)
    return hashlib.sha256(content).digest(), found


_ANY_RATE = 1e9  # frames a second
AS_THEY_ARE = {"do_resize": False}  # of frames that are scaled already


@dataclass(frozen=True)
class PicturePatches:
    """An image or a video as the model gets it. pixels: float32 [patches, dim], or a video that is read in parts; pace:
    of a video's steps.

    features: where features are cached; a picture that has some has no pixels."""

    pixels: np.ndarray | LongVideo
    grid: Grid | ProcessorOutput
    pace: FrameTimes | None = None
    features: Features | None = None


@dataclass(frozen=True)
class Outline:
    """A picture without its pixels."""

    grid: Grid | ProcessorOutput
    pace: FrameTimes | None = None


@dataclass(frozen=True)
class ModelMedia:
    """What a model takes of pictures and sound, and in which form.

    image_tokens: how many tokens the text model reserves for an image of a given grid. patches: what the image
    processor gave for one image → (rows float32 [patches, dim], grid). image_arguments: of the image processor.

    written: an image's placeholder in a prompt, and what goes there for its form; None: the placeholder again and
    again. frame_patches: patches of each frame or tile of a picture. pictures_apart: whether the model tells
    neighbouring pictures by the tokens between them.

    videos: None for a model that sees none. sounds: None for a run without audio; no_audio: why, for errors.

    positions: that the model supports; None: any. about: all else that decides lengths. kept: lookup of cached
    features; None: there is none."""

    image_processor: BaseImageProcessor | None = None
    image_token_id: int | None = None
    image_tokens: Tokens = lambda grid: 0
    patches: Callable[[Output], tuple[np.ndarray, Grid | ProcessorOutput]] | None = None
    image_arguments: Mapping[str, Any] = field(default_factory=dict)
    written: tuple[str, Callable[[Any], str]] | None = None
    frame_patches: Callable[[Grid | ProcessorOutput], tuple[int, ...]] = frame_patches
    pictures_apart: bool = False
    videos: Videos | None = None
    sounds: AudioPreprocessing | None = None
    no_audio: str = ""
    positions: PositionRange | None = None
    about: Sequence[Any] = ()
    kept: CachedPictures | None = None


NO_MEDIA = ModelMedia()


class Pictures:
    """Image and video preprocessing of one model. Safe to call from several threads."""

    def __init__(self, media: ModelMedia, data: DataConfig) -> None:
        """data: bounds of pictures and videos. Raises ConfigError for impossible ones."""
        assert media.image_processor is not None and media.patches is not None
        self._image_processor, self._image_tokens, self._as_patches = (
            media.image_processor,
            media.image_tokens,
            media.patches,
        )
        self._videos, self._arguments = media.videos, dict(media.image_arguments)
        self._bounds = self._video_bounds = (data.min_pixels, data.max_pixels)
        self._scaling = self._video_scaling = area_bounds(self._image_processor, *self._bounds)
        if media.videos is not None and media.videos.max_pixels is not None:
            self._video_bounds = (data.min_pixels, media.videos.max_pixels)
            self._video_scaling = area_bounds(self._image_processor, *self._video_bounds, "data.video_max_pixels")
        self._grids = Grids(self._image_processor, self._scaling, self._image_tokens)
        self._video_grids = Grids(self._image_processor, self._video_scaling, self._image_tokens)
        self._fitted_grids = Grids(self._image_processor, AS_THEY_ARE, self._image_tokens)
        self._quick = quick_patches(self._image_processor, self._arguments, self._scaling)
        self._reduced = data.reduced_jpeg
        if self._reduced and self._quick is None:
            raise ConfigError(
                f"data.reduced_jpeg=true, but {type(self._image_processor).__name__} does not scale a picture to about "
                "its own size by Pillow, as Qwen's processors do. Set data.reduced_jpeg=false"
            )
        self._whole_frames = data.video_whole_frames
        self._kept, self._digest = media.kept, "" if media.kept is None else media.kept.digest(self.about())

    def decode(self, media: Sequence[Picture]) -> list[PicturePatches]:
        """Pictures with their pixels, or with their cached features. Raises DataError for a file that
        cannot be used."""
        if self._kept is None:
            return [self._decode(one) for one in media]
        return [self._look_up(self._kept, one) for one in media]

    def read_patches(self, video: LongVideo, rows: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Some patches of a video, step in time by step: where in `rows` they are, and they, float32 [some, dim].

        rows: which patches, int64. Only steps that have some are decoded. Raises UnreadableVideo where `decode` would
        raise DataError."""
        try:
            yield from self._some_patches(video, rows)
        except DataError as error:
            raise UnreadableVideo(str(error), video.file) from error

    def complete(self, sample: Sample) -> Sample:
        """The sample with all its pixels. Raises DataError."""
        whole = (self._all_patches(one) if isinstance(one, LongVideo) else one for one in sample.pixels)
        return replace(sample, pixels=tuple(whole))

    def require_readable(self, sample: Sample) -> None:
        """Decode the frames that the sample left in files, one step in time after another, and discard them. Raises
        DataError for those that cannot be decoded."""
        for one in sample.pixels:
            if isinstance(one, LongVideo):
                for _ in self.read_patches(one, np.arange(len(one))):
                    pass

    def outline(self, media: Sequence[Picture]) -> list[Outline]:
        """Outlines of what `decode` would give, from headers. Raises DataError as it does, as far as headers show."""
        return [self._video_outline(m) if isinstance(m, Video) else self._image_outline(m) for m in media]

    def runs(self, seen: Sequence[PicturePatches | Outline]) -> list[int]:
        """Tokens of each run of placeholders: of a picture, or of each step of a video whose steps stand apart."""
        runs = []
        for one in seen:
            apart = None if one.pace is None or self._videos is None else self._videos.step_tokens
            if apart is None or isinstance(one.grid, ProcessorOutput):
                runs.append(self._image_tokens(one.grid))
            else:
                t, h, w = one.grid
                runs += [self._image_tokens((1, h, w))] * t
        return runs

    def about(self) -> list[Any]:
        """All that decides the number of tokens of pictures, except the files."""
        videos = self._videos
        timing: list[Any] = []
        if videos is not None:
            timing = [videos.token_id, asdict(videos.taking), videos.step_tokens, videos.step_text(12.345, 11.9)]
            timing += ["by times", repr(videos.size)]
        processor = self._image_processor.to_json_string()
        reduced = ["reduced JPEG"] if self._reduced else []
        return [processor, self._arguments, self._scaling, self._video_scaling, timing, *reduced]

    def _some_patches(self, video: LongVideo, rows: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        videos, (_, h, w) = self._seeing(video.file), video.grid
        taking, scaling = self._taking(video.settings), self._scaling_of(video.settings, moving=True)
        steps, inside = np.divmod(rows, h * w)
        order = np.argsort(steps, kind="stable")
        wanted, starts = np.unique(steps[order], return_index=True)
        frames = read_groups(video.file, taking, video.length, wanted.tolist())
        count = len(taking.indices(*astuple(video.length)))
        for places, group in zip(np.split(order, starts[1:]), frames, strict=True):
            patches, grid = videos.patches(self._process_frames(group, count, video.file, scaling))
            if grid[1:] != (h, w):
                raise DataError(
                    f"video {name_of(video.file)} has frames of {grid[1]} × {grid[2]} patches, and its first is of "
                    f"{h} × {w}. Write it in one size"
                )
            yield places, patches[inside[places]]

    def _all_patches(self, video: LongVideo) -> np.ndarray:
        return np.concatenate([patches for _, patches in self.read_patches(video, np.arange(len(video)))])

    def _look_up(self, kept: CachedPictures, medium: Picture) -> PicturePatches:
        """A picture with its features and without pixels; where none are cached, with its pixels and their key."""
        medium, features, seen = kept.look_up(medium, self._digest, self._image_tokens)
        if seen is not None:
            return PicturePatches(np.zeros((0, 0), np.float32), *seen, features)
        found = self._decode(medium)
        return replace(found, features=replace(features, about=seen_to_json(found.grid, found.pace)))

    def _decode(self, medium: Picture) -> PicturePatches:
        return self._video(medium) if isinstance(medium, Video) else self._image(medium)

    def _image(self, medium: Picture) -> PicturePatches:
        (file,) = files_of(medium)
        scaling = self._scaling_of(settings_of(medium), moving=False)
        if self._quick is not None and self._reduced:
            image, scaled = self._quick.open_reduced(file, scaling)
            scaling = AS_THEY_ARE if scaled else scaling
        else:
            image = open_image(file)
        return PicturePatches(*self._as_patches(self._process([image], file, scaling)))

    def _image_outline(self, medium: Picture) -> Outline:
        (file,) = files_of(medium)
        scaling = self._scaling_of(settings_of(medium), moving=False)

        def blank(size: Size) -> Grid | ProcessorOutput:
            return self._as_patches(self._process([Image.new("RGB", size)], file, scaling))[1]

        size = read_size(file)
        return Outline(self._grids(size, blank) if scaling is self._scaling else blank(size))

    def _video(self, video: Video) -> PicturePatches:
        file, videos = video.file, self._seeing(video.file)
        taking, scaling = self._taking(video.settings), self._scaling_of(video.settings, moving=True)
        length = VideoLength(0, 0.0) if isinstance(file, Frames) else read_length(file)
        count = count_images(file, taking) if isinstance(file, Frames) else len(taking.indices(*astuple(length)))
        make: Callable[[list[Image.Image]], tuple[np.ndarray, Grid]] = lambda frames: videos.patches(
            self._process_frames(frames, count, file, scaling)
        )
        if isinstance(file, Frames):
            groups, pace = map_images(file, taking, make)
        else:
            if self._whole_frames is not None and count > self._whole_frames:
                pace = taking.pace(*astuple(length))
                (first,) = read_groups(file, taking, length, [0])  # headers do not tell whether frames are turned
                grid = (len(pace.times), *make(first)[1][1:])
                return PicturePatches(LongVideo(file, length, grid, video.settings), grid, pace)
            groups, pace = map_frames(file, taking, make, length)
        _, h, w = groups[0][1]
        return PicturePatches(np.concatenate([rows for rows, _ in groups]), (len(groups), h, w), pace)

    def _video_outline(self, video: Video) -> Outline:
        file, videos = video.file, self._seeing(video.file)
        taking, scaling = self._taking(video.settings), self._scaling_of(video.settings, moving=True)

        extent = extent_of_images(file, taking) if isinstance(file, Frames) else read_extent(file, taking)
        size, fits = (extent.width, extent.height), videos.size is not None and not scaling
        size = self._fit(size, extent.taken, file) if fits else size

        def blank(size: Size) -> Grid:
            frames = [Image.new("RGB", size)] * taking.group
            return videos.patches(self._process(frames, file, AS_THEY_ARE if fits else scaling))[1]

        grids = self._fitted_grids if fits else self._video_grids
        _, h, w = grids(size, blank) if fits or scaling is self._video_scaling else blank(size)
        return Outline((extent.frames // taking.group, h, w), extent.pace)

    def _taking(self, settings: Settings) -> FrameSampling:
        """Which frames are taken of a video with such settings. So many frames, whatever their number a second, are
        taken at a rate that no video has. Raises DataError for more than the configuration allows."""
        assert self._videos is not None  # `_seeing` has made sure
        taking = self._videos.taking
        fps = settings.fps or (_ANY_RATE if settings.frames else taking.fps)
        most = settings.frames or settings.max_frames or taking.max_frames
        if most > taking.max_frames:
            raise DataError(f"{most} frames of a video are more than data.video_max_frames={taking.max_frames}")
        return replace(taking, fps=fps, max_frames=most, start=settings.start, end=settings.end)

    def _scaling_of(self, settings: Settings, moving: bool) -> dict[str, Any]:
        """The bounds of a picture with such settings. Raises DataError for some that cannot be kept."""
        own = (settings.min_pixels, settings.max_pixels)
        if own == (None, None):
            return self._video_scaling if moving else self._scaling
        bounds = self._video_bounds if moving else self._bounds
        try:
            scaling = area_bounds(self._image_processor, own[0] or bounds[0], own[1] or bounds[1])
        except ConfigError as error:
            raise DataError(f"min_pixels and max_pixels of a picture: {error}") from error
        most = max(self._image_processor.size["longest_edge"], bounds[1] or 0)
        if scaling["size"]["longest_edge"] > most:
            raise DataError(f"'max_pixels' {own[1]} of a picture is more than {most}, the most that this run has")
        return scaling

    def _seeing(self, file: File | Frames) -> Videos:
        if self._videos is None:
            raise DataError(f"video {name_of(file)}, but this model sees images only. Leave videos out of its data")
        return self._videos

    def _process_frames(
        self, frames: list[Image.Image], count: int, file: File | Frames, scaling: dict[str, Any]
    ) -> Output:
        """Some of `count` frames that are taken of a video."""
        if self._seeing(file).size is None or scaling:
            return self._process(frames, file, scaling)
        size = self._fit(frames[0].size, count, file)
        scaled = [frame.resize(size, self._image_processor.resample) for frame in frames]
        return self._process(scaled, file, AS_THEY_ARE)

    def _fit(self, size: Size, count: int, file: File | Frames) -> Size:
        fit = self._seeing(file).size
        assert fit is not None
        try:
            return fit(count, size)
        except ValueError as error:
            raise DataError(f"video {name_of(file)} ({size[0]} × {size[1]}) cannot be scaled: {error}") from error

    def _process(self, images: list[Image.Image], file: File | Frames, scaling: dict[str, Any]) -> Output:
        try:
            if self._quick is not None:
                return self._quick(images, scaling)
            return self._image_processor(images=images, return_tensors="np", **self._arguments, **scaling)
        except ValueError as error:  # for example sides too unequal to scale
            size = f"{images[0].width} × {images[0].height}"
            raise DataError(f"image {name_of(file)} ({size}) cannot be scaled: {error}") from error
