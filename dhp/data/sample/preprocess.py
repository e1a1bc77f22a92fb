"""Turns a record into a sample: chat template, tokenisation, labels on the answers, pictures and audio as features."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass
from hashlib import sha256
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import transformers

from dhp.core.batch import IGNORED, SOUND, Grid, PositionRange
from dhp.core.errors import DataError, ModelError
from dhp.data.media.frames import FrameTimes
from dhp.data.read.records import Record, located
from dhp.data.sample.audio import NO_ACTORS, AudioPreprocessing, Clip, refuse_sound, sounds_of
from dhp.data.sample.cached_features import CachedPictures
from dhp.data.sample.chat import Rendered, render, replace_each, to_messages
from dhp.data.sample.lengths import Length, check_characters, check_length, longest_token
from dhp.data.sample.pictures import Outline, Output, PicturePatches, Pictures, Videos
from dhp.data.sample.sample import Sample

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase
    from transformers.image_processing_utils import BaseImageProcessor

_BESIDE_A_CUT = 64  # tokens: where a text is cut, its last word may become other tokens
_DECOMPOSED = 4  # characters at most that normal form C makes one of
Written = tuple[str, Callable[[Any], str]]  # an image's placeholder in a prompt, and what goes there for its form
Seen = TypeVar("Seen", PicturePatches, Outline)

# Templates are compiled once and then shared, and one that tracks its answers is not reentrant.
# A lock of the module leaves the preprocessor itself picklable. Images are decoded outside of it.
_TEXT = threading.Lock()


@dataclass(frozen=True)
class Tokens:
    """A tokenised conversation with one token for each image, and which of its tokens are targets."""

    ids: np.ndarray  # int64 [tokens]
    target: np.ndarray  # bool [tokens]


@dataclass(frozen=True)
class Prompts:
    """How conversations are written, beyond what the model's chat template says.

    system: text of those that have none; None: nothing is added. learn_empty_thoughts: see `dhp.data.sample.chat.render`.
    no_audio: why a run takes no audio, for errors.
    """

    system: str | None = None
    learn_empty_thoughts: bool = False
    no_audio: str = NO_ACTORS


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
        written: Written | None = None,
        about: Sequence[Any] = (),
        image_arguments: Mapping[str, Any] = MappingProxyType({}),
        sounds: AudioPreprocessing | None = None,
        prompts: Prompts = Prompts(),
        kept: CachedPictures | None = None,
        positions: PositionRange | None = None,
        whole_frames: int | None = None,
    ) -> None:
        """image_tokens: how many tokens the text model reserves for an image of a given grid. patches: what the image
        processor gave for one image → (rows float32 [patches, dim], grid).
        min_pixels, max_pixels: width × height bounds of a scaled image; None: the image processor's own.
        videos: None for a model that sees none. max_tokens: of a sample, those of its pictures included. written: how a
        prompt shows an image; None: by its placeholder again and again. about: all else that decides lengths.
        image_arguments: of the image processor. sounds: None for a run without audio. prompts:
        how conversations are written. kept: lookup of cached features; None: there is none. positions: that the
        model supports; None: any. whole_frames: videos of more frames stay in their files
        (`Pictures.read_patches`); None: none do.

        Raises ModelError for a tokenizer that cannot give labels, ConfigError for impossible bounds.
        """
        if not tokenizer.is_fast:
            raise ModelError(f"tokenizer {tokenizer.name_or_path!r} gives no offsets; a fast tokenizer is needed")
        if tokenizer.chat_template is None:
            raise ModelError(f"tokenizer {tokenizer.name_or_path!r} has no chat template, so answers have no place")
        self._tokenizer = tokenizer
        self._image_token_id = image_token_id
        self._videos, self._max_tokens, self._written, self._about = videos, max_tokens, written, list(about)
        self._sounds, self._prompts, self._positions = sounds, prompts, positions
        self._pictures = Pictures(
            image_processor, image_tokens, patches, min_pixels, max_pixels, videos, image_arguments, kept, whole_frames
        )
        self._longest = longest_token(json.loads(tokenizer.backend_tokenizer.to_str()))
        self._special = frozenset(i for i, token in tokenizer.added_tokens_decoder.items() if token.special)

    def __call__(self, record: Record) -> Sample:
        """Decode and tokenise one record; one that asks becomes a prompt, without labels. DataError, with the record's
        place, when it cannot be used."""
        with located(record.where):
            clips = [] if self._sounds is None else self._sounds.decode(sounds_of(record))
            tokens, pictures = self._read(record, self._pictures.decode, clips)
            return self._assemble(record, tokens, pictures, clips)

    @property
    def pictures(self) -> Pictures:
        """How images and videos are read."""
        return self._pictures

    def measure(self, record: Record) -> Length:
        """Length of the sample that a call would give, from the headers of its files.

        No pixel is decoded, except to count the frames of a video whose header does not tell their number. Raises
        DataError as a call does, with the record's place, for defects that show without pixels.
        """
        with located(record.where):
            clips = [] if self._sounds is None else self._sounds.outline(sounds_of(record))
            tokens, outlines = self._read(record, self._pictures.outline, clips)
            runs = self._pictures.runs(outlines)
            shown = self._written is not None
            length = Length(sum(runs), len(tokens.ids) + (0 if shown else sum(runs) - len(runs)))
            check_length(length, self._max_tokens, self._positions)
            return length

    def fingerprint(self) -> str:
        """Hex digest of all that decides lengths, except the records: equal digests mean equal lengths."""
        tokenizer = self._tokenizer
        backend = json.loads(tokenizer.backend_tokenizer.to_str())
        about = {
            "transformers": transformers.__version__,
            # A call sets the other two, whatever the tokenizer's file says of them.
            "tokenizer": {key: value for key, value in backend.items() if key not in ("truncation", "padding")},
            "template": [tokenizer.chat_template, tokenizer.special_tokens_map],
            "pictures": [self._image_token_id, *self._pictures.about()],
            "max_tokens": self._max_tokens,
            "positions": None if self._positions is None else astuple(self._positions),
            **({} if self._prompts.system is None else {"system": self._prompts.system}),
            "family": self._about,
            **({} if self._sounds is None else {"sounds": list(self._sounds.about)}),
        }
        return sha256(json.dumps(about, sort_keys=True, default=str).encode()).hexdigest()

    def _read(
        self, record: Record, look: Callable[[Sequence[Any]], list[Seen]], clips: Sequence[Clip]
    ) -> tuple[Tokens, list[Seen]]:
        """The conversation, with the tokens of the given clips, and its pictures.

        The text is read first, because its defects show soonest; but where it tells the times of frames, the pictures
        come first.
        """
        if self._sounds is None:
            refuse_sound(record, self._prompts.no_audio)
        apart = self._videos is not None and self._videos.step_tokens is not None
        if apart and len(record.images) < len(record.media):
            seen = look(record.media)
            return self._tokens(record, clips, [one.pace for one in seen if one.pace is not None]), seen
        if self._written is not None and record.media:
            seen = look(record.media)
            return self._tokens(record, clips, [], seen), seen
        return self._tokens(record, clips, []), look(record.media)

    def _tokens(
        self,
        record: Record,
        clips: Sequence[Clip],
        paces: Sequence[FrameTimes],
        shown: Sequence[PicturePatches | Outline] = (),
    ) -> Tokens:
        """paces: of the videos whose times the prompt has. shown: pictures that the prompt shows in their own way."""
        if record.written is not None:
            tokens = self._plain_tokens(record.written)
            self._check(record, tokens, paces, shown)
            return tokens
        with _TEXT:
            messages = to_messages(record.turns, self._prompts.system)
            rendered = render(self._tokenizer, messages, self._prompts.learn_empty_thoughts, record.learned)
            check_characters(rendered.text, len(record.media), self._longest, self._max_tokens, self._positions)
            rendered = self._with_times(rendered, paces) if paces else rendered
            rendered = self._with_pictures(rendered, shown) if shown else rendered
            rendered = self._with_sounds(rendered, clips) if self._sounds is not None else rendered
            encoding = self._tokenizer(
                rendered.text, add_special_tokens=False, return_offsets_mapping=True, verbose=False
            )
        ids = np.array(encoding["input_ids"], dtype=np.int64)
        offsets = np.array(encoding["offset_mapping"], dtype=np.int64).reshape(-1, 2)
        tokens = Tokens(ids, self._targets(ids, offsets, rendered))
        self._check(record, tokens, paces, shown)
        return tokens

    def _plain_tokens(self, text: str) -> Tokens:
        """Plain text between the tokens that the tokenizer begins a text with and the one that ends it, cut after
        max_tokens; all of it is learned."""
        most, end = self._max_tokens, self._tokenizer.eos_token_id
        if most is not None and self._longest is not None:  # what is cut anyway would take memory as tokens
            text = text[: _DECOMPOSED * self._longest * (most + _BESIDE_A_CUT)]
        with _TEXT:
            ids = self._tokenizer(text, verbose=False)["input_ids"]
        if end is not None and ids[-1:] != [end]:
            ids = [*ids, end]
        return Tokens(np.array(ids[:most], dtype=np.int64), np.ones(len(ids[:most]), dtype=bool))

    def _with_pictures(self, rendered: Rendered, shown: Sequence[PicturePatches | Outline]) -> Rendered:
        """Replace the placeholder of each image by what the family's processor writes for it: in the text, as that
        processor does, because tokens are not always those of the pieces."""
        placeholder, text_of = self._written
        found = rendered.text.count(placeholder)
        if found != len(shown):
            raise _miscounted("image", found, len(shown), placeholder)
        return replace_each(rendered, placeholder, [text_of(one.grid) for one in shown])

    def _with_sounds(self, rendered: Rendered, clips: Sequence[Clip]) -> Rendered:
        """Repeat the placeholder of each clip to its length."""
        placeholder = self._tokenizer.convert_ids_to_tokens(self._sounds.token_id)
        found = rendered.text.count(placeholder)
        if found != len(clips):
            raise _miscounted("audio clip", found, len(clips), placeholder)
        return replace_each(rendered, placeholder, [placeholder * clip.form.tokens for clip in clips])

    def _with_times(self, rendered: Rendered, paces: Sequence[FrameTimes]) -> Rendered:
        """Replace the placeholder of each video by one for each step in time. This is done in the text, not among its
        tokens, because the text before a time may share a token with it."""
        videos, name = self._videos, self._tokenizer.convert_ids_to_tokens
        token, first, last = map(name, (videos.token_id, *videos.step_tokens))
        found = rendered.text.count(token)
        if found != len(paces):
            raise _miscounted("video", found, len(paces), token)

        def show(pace: FrameTimes) -> str:
            texts = (videos.step_text(*times) for times in zip(pace.times, pace.firsts, strict=True))
            return "".join(f"{before}{first}{token}{last}{behind}" for before, behind in texts)

        return replace_each(rendered, token, [show(pace) for pace in paces])

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

    def _check(
        self, record: Record, tokens: Tokens, paces: Sequence[FrameTimes], shown: Sequence[PicturePatches | Outline]
    ) -> None:
        images = sum(self._pictures.runs(shown)) if shown else len(record.images)
        videos = sum(len(pace.times) for pace in paces) or len(record.media) - images
        counts = {"image": (self._image_token_id, images), "video": (None, videos)}
        if self._videos is not None:
            counts["video"] = (self._videos.token_id, videos)
        for kind, (token, wanted) in counts.items():
            placeholders = wanted if token is None else int((tokens.ids == token).sum())
            if placeholders != wanted:
                raise _miscounted(kind, placeholders, wanted, self._tokenizer.decode([token]))
        if not record.asks and not tokens.target[1:].any():
            raise DataError("no target token: the chat template writes no answer for this conversation")

    def _assemble(
        self, record: Record, tokens: Tokens, pictures: list[PicturePatches], clips: Sequence[Clip]
    ) -> Sample:
        """Repeat each placeholder to the length of its picture."""
        kinds = (tokens.ids == self._image_token_id).astype(np.int64)
        if self._videos is not None:
            kinds[tokens.ids == self._videos.token_id] = 2
        repeats = np.ones(len(tokens.ids), dtype=np.int64)
        if self._written is None:  # else the prompt has them all
            repeats[kinds > 0] = self._pictures.runs(pictures)
        check_length(Length(int(repeats[kinds > 0].sum()), int(repeats.sum())), self._max_tokens, self._positions)
        labels = np.where(tokens.target, tokens.ids, IGNORED)
        if self._sounds is not None:
            kinds[tokens.ids == self._sounds.token_id] = SOUND  # as many as the clips have
        return Sample(
            dataset=record.dataset,
            position=record.position,
            input_ids=np.repeat(tokens.ids, repeats),
            labels=np.repeat(labels, repeats),
            mm_token_type_ids=np.repeat(kinds, repeats),
            pixels=tuple(picture.pixels for picture in pictures),
            grids=tuple(picture.grid for picture in pictures),
            seconds=tuple(None if picture.pace is None else picture.pace.seconds for picture in pictures),
            clips=tuple(clip.features for clip in clips if clip.features is not None),
            clip_forms=tuple(clip.form for clip in clips),
            features=tuple(picture.features for picture in pictures if picture.features is not None),
        )


def _miscounted(kind: str, placeholders: int, wanted: int, token: str) -> DataError:
    return DataError(
        f"{placeholders} {kind} placeholder tokens for {wanted} {kind}s: the text itself holds {token!r}, or the chat "
        f"template drops {kind}s"
    )
