"""One preprocessed conversation: arrays, lengths, sizes of pictures."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np

from dhp.core.batch import IGNORED, Features, Grid, PositionRange, ProcessorOutput
from dhp.core.errors import ConfigError, DataError
from dhp.core.preferences import Mark
from dhp.data.media.frames import FrameSampling, LongVideo

if TYPE_CHECKING:
    from transformers.image_processing_utils import BaseImageProcessor

Form = TypeVar("Form", bound=Grid | ProcessorOutput)

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


Size = tuple[int, int]  # (width, height) in pixels

_KEPT_SIZES = 1 << 16  # sizes whose grids stay in memory
_PROBES = ((50, 70), (640, 480), (3001, 1203))  # one is enlarged, one shrunk, by most bounds


class Grids:
    """Grids of pictures by their size, for one image processor.

    They come from the processor's own formula (`get_number_of_image_patches`) where it has one that holds; else the
    processor runs on a blank picture, once a size."""

    def __init__(
        self, processor: BaseImageProcessor, scaling: Mapping[str, Any], tokens: Callable[[Grid | ProcessorOutput], int]
    ) -> None:
        """scaling: further arguments of the processor. tokens: how many tokens a picture of a grid has."""
        self._processor, self._tokens = processor, tokens
        bounds = scaling.get("size", {})  # the formula knows the two bounds by other names than the processor
        names = {"shortest_edge": "min_pixels", "longest_edge": "max_pixels"}
        self._bounds = {names[edge]: pixels for edge, pixels in bounds.items()}
        self._by_formula: bool | None = None  # None: not tried yet
        self._known: dict[Size, Any] = {}

    def __call__(self, size: Size, run: Callable[[Size], Form]) -> Grid | Form:
        """A grid with as many tokens as the true one. run: the processor's own answer, by a blank picture of a size.

        Raises what `run` raises for a size that the processor does not take."""
        if self._by_formula is None:
            self._by_formula = self._formula_holds(run)
        if self._by_formula:
            try:
                return self._formula(size)
            except ValueError:
                return run(size)  # which raises it in the words of the true one
        grid = self._known.get(size)
        if grid is None:
            if len(self._known) >= _KEPT_SIZES:
                self._known.clear()
            grid = self._known[size] = run(size)
        return grid

    def _formula(self, size: Size) -> Grid:
        width, height = size
        return 1, 1, self._processor.get_number_of_image_patches(height, width, self._bounds)

    def _formula_holds(self, run: Callable[[Size], Grid | ProcessorOutput]) -> bool:
        # Some processors count tiles under this name, some are set not to scale, and a family may count tokens by
        # the sides of a grid: wherever the formula is not the whole truth, it is not used.
        if not hasattr(self._processor, "get_number_of_image_patches"):
            return False
        try:
            return all(self._tokens(self._formula(size)) == self._tokens(run(size)) for size in _PROBES)
        except Exception:  # a formula of another kind may raise anything
            return False


class Length(NamedTuple):
    """A sample in numbers, which are a row of `LENGTH_COLUMNS`.

    vision: tokens of its pictures; text: all tokens that the decoder sees, those included.

    patches: that enter the tower, of all pictures. pictures: images and videos.

    squares: Σ (patches of a frame or tile)², the pairs of a tower's full attention. The square of all patches would
    overstate them k-fold for k equal pictures.

    sound: tokens of its audio clips. targets: tokens that the loss counts. pairs: tokens², of a preference of each side
    by itself: what may see what in the decoder.

    encoded_bytes: of its files of images, videos and sound as they are stored; those behind an address count as 0."""

    vision: int
    text: int
    patches: int = 0
    pictures: int = 0
    squares: int = 0
    sound: int = 0
    targets: int = 0
    pairs: int = 0
    encoded_bytes: int = 0


_LARGE = ("squares", "pairs", "encoded_bytes")  # may pass 2³¹
# One row a sample: the fields of `Length` in their order, in which each is aligned; 48 bytes.
LENGTH_COLUMNS = np.dtype([(name, np.int64 if name in _LARGE else np.int32) for name in Length._fields])


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
    words are one token, where text is taken away before, or where a token takes the space around it along."""
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
    bounds = (max_tokens, None if positions is None else positions.count)
    most = min((bound for bound in bounds if bound is not None), default=None)
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
    return step["type"] != "Replace" or len(step["content"]) >= len(
        step["pattern"].get("String", step["content"] + " ")
    )


@dataclass(frozen=True, eq=False)
class Sample:
    """The model's inputs of one conversation. L: its tokens, each placeholder repeated to the length of its picture.

    position: 1-based number among the samples of `dataset`, in all its files. "Picture": an image or a video."""

    dataset: str
    position: int
    input_ids: np.ndarray  # int64 [L]
    labels: np.ndarray  # int64 [L], IGNORED outside answers; not shifted: labels[i] is input_ids[i]
    mm_token_type_ids: np.ndarray  # int64 [L], 0 at text, 1 at tokens of images, 2 of videos, 3 of sound
    # One float32 [patches, channels × frames × patch × patch] a picture; a long video's are still in its file.
    pixels: tuple[np.ndarray | LongVideo, ...]
    grids: tuple[Grid | ProcessorOutput, ...]  # one a picture: t × h × w = patches, or the form of one that is no grid
    seconds: tuple[float | None, ...] = ()  # one a picture: of one step in t of a video, None: an image; (): all images
    clips: tuple[np.ndarray, ...] = ()  # one float32 [frames, bins] a clip of sound
    clip_forms: tuple[ProcessorOutput, ...] = ()  # one a clip
    features: tuple[Features, ...] = ()  # one a picture, where they are cached, without rows of pixels
    again: bool = False  # it shows the pictures of the sample before it in its row, and has none of their pixels
    mark: Mark | None = None  # of one side of a preference
    sides: tuple[Sample, Sample] | None = None  # of a preference, which has the tokens of both and the pictures of all
    columns: Mapping[str, np.ndarray] = field(default_factory=dict)  # float64 [L] each, of losses of someone's own loop

    @property
    def video_seconds(self) -> tuple[float | None, ...]:
        """`seconds`, one a picture."""
        return self.seconds or (None,) * len(self.grids)

    @property
    def patches(self) -> int:
        """Of all pictures, those that are not here included."""
        return sum(grid.rows if isinstance(grid, ProcessorOutput) else prod(grid) for grid in self.grids)

    @property
    def target_tokens(self) -> int:
        """Tokens that the loss counts. The first token of a row is predicted by nothing."""
        return int((self.labels[1:] != IGNORED).sum())


def joined_sides(first: Sample, second: Sample) -> Sample:
    """A preference of two sides, whose pictures `second` shows again or adds to."""
    token: dict[str, Any] = {
        name: np.concatenate([getattr(first, name), getattr(second, name)])
        for name in ("input_ids", "labels", "mm_token_type_ids")
    }
    names = ("pixels", "clips", "features", *(() if second.again else ("grids", "seconds", "clip_forms")))
    more: dict[str, Any] = {name: getattr(first, name) + getattr(second, name) for name in names}
    return replace(first, **token, **more, sides=(first, second))


Output = Mapping[str, np.ndarray]  # of the image processor


@dataclass(frozen=True)
class Videos:
    """Video preprocessing of one model.

    token_id: placeholder of a video; None: its rows have those of images. whole: of a model whose frames are pictures;
    then the rest but `taking` is not asked.

    patches: the image processor's output for one group of frames → (rows float32 [patches, dim], grid).

    max_pixels: width × height of a frame; None: as an image's. size: of each scaled frame of a video, by how many are
    taken and their size; None: as an image's. It holds where no bounds are set.

    step_tokens: None where a video is one run of placeholders in the prompt. Otherwise each step in time is a run of
    its own, which stands between these two tokens, and these between the texts that `step_text` makes of its seconds.
    """

    token_id: int | None
    taking: FrameSampling
    patches: Callable[[Output], tuple[np.ndarray, Grid]]
    max_pixels: int | None = None
    step_tokens: tuple[int, int] | None = None
    step_text: Callable[[float, float], tuple[str, str]] = lambda middle, first: ("", "")
    size: Callable[[int, Size], Size] | None = None
    whole: Any = None  # `dhp.models.contract.videos.WholeVideos`


def area_bounds(
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
