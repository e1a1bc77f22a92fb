"""A record to a sample: chat template, one tokenisation, labels on the answers, pictures to patches."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from hashlib import sha256
from typing import Any

import numpy as np
import transformers
from PIL import Image
from transformers import PreTrainedTokenizerBase
from transformers.image_processing_utils import BaseImageProcessor

from dhp.base.errors import ConfigError, DataError, ModelError
from dhp.data.chat import Rendered, render, to_messages
from dhp.data.lengths.grids import Grid, Grids, Size
from dhp.data.media.images import open_image, read_size
from dhp.data.media.sources import File, Video, name_of
from dhp.data.media.video import Taking, map_frames, read_extent
from dhp.data.records import Record, located
from dhp.data.sample import IGNORED, Sample

Output = Mapping[str, np.ndarray]  # of the image processor

# Templates are compiled once and then shared, and one that tracks its answers is not reentrant.
# A lock of the module leaves the preprocessor itself picklable. Images are decoded outside of it.
_TEXT = threading.Lock()


@dataclass(frozen=True)
class Tokens:
    """A tokenised conversation with one token for each image, and which of its tokens are targets."""

    ids: np.ndarray  # int64 [tokens]
    target: np.ndarray  # bool [tokens]


@dataclass(frozen=True)
class Videos:
    """How the model sees videos. patches: what the image processor gave for one group of frames → (rows float32
    [patches, dim], grid). max_pixels: width × height of a frame; None: as an image's."""

    token_id: int
    taking: Taking
    patches: Callable[[Output], tuple[np.ndarray, Grid]]
    max_pixels: int | None = None


@dataclass(frozen=True)
class Picture:
    """An image or a video as the model gets it. pixels: float32 [patches, dim]; seconds: as in Sample."""

    pixels: np.ndarray
    grid: Grid
    seconds: float | None = None


@dataclass(frozen=True)
class Length:
    """Tokens of a sample. vision: those of its pictures; text: all that the decoder sees, those included."""

    vision: int
    text: int


class Preprocessor:
    """Turns records into samples for one model. Safe to call from several threads."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        image_processor: BaseImageProcessor,
        image_token_id: int,
        image_tokens: Callable[[Grid], int],
        patches: Callable[[Output], tuple[np.ndarray, Grid]],
        min_pixels: int | None = None,
        max_pixels: int | None = None,
        videos: Videos | None = None,
        max_tokens: int | None = None,
    ) -> None:
        """image_tokens: how many tokens the text model reserves for an image of a given grid. patches: what the image
        processor gave for one image → (rows float32 [patches, dim], grid).
        min_pixels, max_pixels: width × height bounds of a scaled image; None: the image processor's own.
        videos: None for a model that sees none. max_tokens: of a sample, those of its pictures included.

        Raises ModelError for a tokenizer that cannot give labels, ConfigError for impossible bounds.
        """
        if not tokenizer.is_fast:
            raise ModelError(f"tokenizer {tokenizer.name_or_path!r} gives no offsets; a fast tokenizer is needed")
        if tokenizer.chat_template is None:
            raise ModelError(f"tokenizer {tokenizer.name_or_path!r} has no chat template, so answers have no place")
        self._tokenizer = tokenizer
        self._image_processor = image_processor
        self._image_token_id = image_token_id
        self._image_tokens = image_tokens
        self._as_patches = patches
        self._scaling = _scaling(image_processor, min_pixels, max_pixels)
        self._videos, self._max_tokens = videos, max_tokens
        self._video_scaling = self._scaling
        if videos is not None and videos.max_pixels is not None:
            self._video_scaling = _scaling(image_processor, min_pixels, videos.max_pixels, "data.video_max_pixels")
        self._grids = Grids(image_processor, self._scaling, image_tokens)
        self._video_grids = Grids(image_processor, self._video_scaling, image_tokens)
        self._special = frozenset(i for i, token in tokenizer.added_tokens_decoder.items() if token.special)

    def __call__(self, record: Record) -> Sample:
        """Decode and tokenise one record. DataError, with the record's place, when it cannot be used."""
        with located(record.where):
            tokens = self._tokens(record)
            pictures = [self._video(m.file) if isinstance(m, Video) else self._image(m) for m in record.media]
            return self._assemble(record, tokens, pictures)

    def measure(self, record: Record) -> Length:
        """Length of the sample that a call would give, from the headers of its files: no pixel is decoded, but to
        count the frames of a video that does not say how many it has. DataError, with the record's place, as a call
        raises it, for what shows without pixels."""
        with located(record.where):
            tokens = self._tokens(record)
            grids = [self._video_grid(m.file) if isinstance(m, Video) else self._image_grid(m) for m in record.media]
            vision = sum(map(self._image_tokens, grids))
            length = Length(vision, len(tokens.ids) - len(grids) + vision)
            self._check_length(length)
            return length

    def fingerprint(self) -> str:
        """Hex digest of all that lengths depend on beside the records: where it is the same, so are they."""
        tokenizer, videos = self._tokenizer, self._videos
        backend = json.loads(tokenizer.backend_tokenizer.to_str())
        about = {
            "transformers": transformers.__version__,
            # A call sets the other two, whatever the tokenizer's file says of them.
            "tokenizer": {key: value for key, value in backend.items() if key not in ("truncation", "padding")},
            "template": [tokenizer.chat_template, tokenizer.special_tokens_map],
            "image processor": [self._image_processor.to_json_string(), self._scaling, self._video_scaling],
            "image": [self._image_token_id, self._image_tokens((2, 12, 12))],
            "videos": videos and [videos.token_id, asdict(videos.taking)],
            "max_tokens": self._max_tokens,
        }
        return sha256(json.dumps(about, sort_keys=True, default=str).encode()).hexdigest()

    def _tokens(self, record: Record) -> Tokens:
        with _TEXT:
            rendered = render(self._tokenizer, to_messages(record.turns))
            encoding = self._tokenizer(
                rendered.text, add_special_tokens=False, return_offsets_mapping=True, verbose=False
            )
        ids = np.array(encoding["input_ids"], dtype=np.int64)
        offsets = np.array(encoding["offset_mapping"], dtype=np.int64).reshape(-1, 2)
        tokens = Tokens(ids, self._targets(ids, offsets, rendered))
        self._check(record, tokens)
        return tokens

    def _targets(self, ids: np.ndarray, offsets: np.ndarray, rendered: Rendered) -> np.ndarray:
        """bool [tokens]: tokens that begin inside an answer, up to and with its end-of-turn token."""
        target = np.zeros(len(ids), dtype=bool)
        for start, stop in rendered.spans:
            first, last = np.searchsorted(offsets[:, 0], (start, stop))
            last = self._end_of_turn(ids, offsets, rendered.text[:stop], first, last)
            target[first:last] = True
        return target

    def _end_of_turn(self, ids: np.ndarray, offsets: np.ndarray, text: str, first: int, last: int) -> int:
        """Move `last` (exclusive) so that the answer ends with its end-of-turn token.

        Templates write a newline after that token, which nothing should learn to say; and some leave
        the token itself outside their generation block, which would teach the model never to stop.
        """
        special = [i for i in range(first, last) if ids[i] in self._special]
        if special and not text[offsets[special[-1], 1] :].strip():
            return special[-1] + 1
        if last < len(ids) and ids[last] == self._tokenizer.eos_token_id:
            return last + 1
        return last

    def _check(self, record: Record, tokens: Tokens) -> None:
        images = len(record.images)
        counts = {"image": (self._image_token_id, images), "video": (None, len(record.media) - images)}
        if self._videos is not None:
            counts["video"] = (self._videos.token_id, counts["video"][1])
        for kind, (token, wanted) in counts.items():
            placeholders = wanted if token is None else int((tokens.ids == token).sum())
            if placeholders != wanted:
                raise DataError(
                    f"{placeholders} {kind} placeholder tokens for {wanted} {kind}s: the text itself "
                    f"holds {self._tokenizer.decode([token])!r}, or the chat template drops {kind}s"
                )
        if not tokens.target[1:].any():
            raise DataError("no target token: the chat template writes no answer for this conversation")

    def _image(self, file: File) -> Picture:
        return Picture(*self._as_patches(self._process([open_image(file)], file, self._scaling)))

    def _image_grid(self, file: File) -> Grid:
        def blank(size: Size) -> Grid:
            return self._as_patches(self._process([Image.new("RGB", size)], file, self._scaling))[1]

        return self._grids(read_size(file), blank)

    def _video(self, file: File) -> Picture:
        videos = self._seeing(file)
        make = lambda frames: videos.patches(self._process(frames, file, self._video_scaling))
        groups, seconds = map_frames(file, videos.taking, make)
        _, h, w = groups[0][1]
        return Picture(np.concatenate([rows for rows, _ in groups]), (len(groups), h, w), seconds)

    def _video_grid(self, file: File) -> Grid:
        videos = self._seeing(file)
        group = videos.taking.group

        def blank(size: Size) -> Grid:
            return videos.patches(self._process([Image.new("RGB", size)] * group, file, self._video_scaling))[1]

        extent = read_extent(file, videos.taking)
        _, h, w = self._video_grids((extent.width, extent.height), blank)
        return extent.frames // group, h, w

    def _seeing(self, file: File) -> Videos:
        if self._videos is None:
            raise DataError(f"video {name_of(file)}, but this model sees images only. Leave videos out of its data")
        return self._videos

    def _process(self, images: list[Image.Image], file: File, scaling: dict[str, Any]) -> Output:
        try:
            return self._image_processor(images=images, return_tensors="np", **scaling)
        except ValueError as error:  # for example sides too unequal to scale
            size = f"{images[0].width} × {images[0].height}"
            raise DataError(f"image {name_of(file)} ({size}) cannot be scaled: {error}") from error

    def _assemble(self, record: Record, tokens: Tokens, pictures: list[Picture]) -> Sample:
        """Repeat each placeholder to the length of its picture."""
        kinds = (tokens.ids == self._image_token_id).astype(np.int64)
        if self._videos is not None:
            kinds[tokens.ids == self._videos.token_id] = 2
        repeats = np.ones(len(tokens.ids), dtype=np.int64)
        repeats[kinds > 0] = [self._image_tokens(picture.grid) for picture in pictures]
        self._check_length(Length(int(repeats[kinds > 0].sum()), int(repeats.sum())))
        labels = np.where(tokens.target, tokens.ids, IGNORED)
        return Sample(
            dataset=record.dataset,
            position=record.position,
            input_ids=np.repeat(tokens.ids, repeats),
            labels=np.repeat(labels, repeats),
            mm_token_type_ids=np.repeat(kinds, repeats),
            pixels=tuple(picture.pixels for picture in pictures),
            grids=tuple(picture.grid for picture in pictures),
            seconds=tuple(picture.seconds for picture in pictures),
        )

    def _check_length(self, length: Length) -> None:
        # Nothing is ever cut: a picture with a part of its tokens would be another picture.
        if self._max_tokens is not None and length.text > self._max_tokens:
            raise DataError(
                f"{length.text} tokens ({length.vision} of images and videos) are more than data.max_tokens="
                f"{self._max_tokens}. Lower data.max_pixels, shorten the sample or raise data.max_tokens"
            )


def _scaling(
    processor: BaseImageProcessor, min_pixels: int | None, max_pixels: int | None, upper: str = "data.max_pixels"
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
