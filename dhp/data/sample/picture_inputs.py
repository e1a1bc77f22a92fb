"""Turns images and videos into patches, cached features or grids."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar

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
from dhp.data.media.sources import File, Frames, Picture, Settings, Video, files_of, name_of, settings_of
from dhp.data.media.video import map_frames, read_extent, read_groups, read_length
from dhp.data.sample.cached_pictures import CachedPictures, Tokens, seen_to_json
from dhp.data.sample.quick_patches import quick_patches
from dhp.data.sample.sample import Grids, Output, Sample, Size, Videos, area_bounds

if TYPE_CHECKING:
    from transformers.image_processing_utils import BaseImageProcessor

Made = TypeVar("Made")
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

    videos: None for a model that sees none; no_videos: why. sounds: None for a run without audio; no_audio: why.

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
    no_videos: str = "this model sees images only"
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
        self._no_videos = media.no_videos
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
            taking = asdict(videos.taking)
            own = [taking.pop("rule"), taking.pop("least")]
            timing = [] if videos.whole is None else [*own, *videos.whole.about()]
            timing += [videos.token_id, taking, videos.step_tokens, videos.step_text(12.345, 11.9)]
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
        if videos.whole is not None:
            frame = videos.whole.frame
            use: Callable[[list[Image.Image]], Output] = lambda group: _scaled(lambda: frame(group[0]), file)
            outputs, pace = map_images(file, taking, use) if isinstance(file, Frames) else map_frames(file, taking, use)
            pixels, form = videos.whole.video(outputs, pace)
            return PicturePatches(pixels, form, pace)
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
        if videos.whole is not None:
            outline = videos.whole.outline
            return Outline(_scaled(lambda: outline(size, extent.pace), file), extent.pace)
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
            raise DataError(f"video {name_of(file)}, but {self._no_videos}. Leave videos out of its data")
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


def _scaled(make: Callable[[], Made], file: File | Frames) -> Made:
    try:
        return make()
    except ValueError as error:  # for example sides too unequal to scale
        raise DataError(f"video {name_of(file)} cannot be scaled: {error}") from error
