"""Turns a record into a sample."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple
from hashlib import sha256
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import transformers

from dhp.core.batch import IGNORED, SOUND, VIDEO, Grid, PositionRange, ProcessorOutput, frame_patches
from dhp.core.errors import DataError
from dhp.data.media.frames import FrameTimes
from dhp.data.media.sources import stored_bytes
from dhp.data.read.records import Record, located
from dhp.data.sample.lengths import Length, check_length
from dhp.data.sample.picture_inputs import CachedPictures, Outline, PicturePatches, Pictures
from dhp.data.sample.sample import Output, Sample, Videos
from dhp.data.sample.tokens import (
    AS_THE_TEMPLATE,
    AudioPreprocessing,
    Clip,
    ConversationTokenizer,
    Prompts,
    Tokens,
    Written,
    miscounted,
    refuse_sound,
    sounds_of,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase
    from transformers.image_processing_utils import BaseImageProcessor

Seen = TypeVar("Seen", PicturePatches, Outline)


class Preprocessor:
    """Turns records into samples for one model. Safe to call from several threads. pictures: how images and videos are
    read."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        image_processor: BaseImageProcessor,
        image_token_id: int,
        image_tokens: Callable[[Grid | ProcessorOutput], int],
        patches: Callable[[Output], tuple[np.ndarray, Grid | ProcessorOutput]],
        min_pixels: int | None = None,
        max_pixels: int | None = None,
        videos: Videos | None = None,
        max_tokens: int | None = None,
        written: Written | None = None,
        about: Sequence[Any] = (),
        image_arguments: Mapping[str, Any] = MappingProxyType({}),
        sounds: AudioPreprocessing | None = None,
        prompts: Prompts = AS_THE_TEMPLATE,
        kept: CachedPictures | None = None,
        positions: PositionRange | None = None,
        whole_frames: int | None = None,
        frame_patches: Callable[[Grid | ProcessorOutput], tuple[int, ...]] = frame_patches,
        pictures_apart: bool = False,
    ) -> None:
        """image_tokens: how many tokens the text model reserves for an image of a given grid. patches: what the image
        processor gave for one image → (rows float32 [patches, dim], grid).
        min_pixels, max_pixels: width × height bounds of a scaled image; None: the image processor's own.
        videos: None for a model that sees none. max_tokens: of a sample, those of its pictures included. written: how a
        prompt shows an image; None: by its placeholder again and again. about: all else that decides lengths.
        image_arguments: of the image processor. sounds: None for a run without audio. prompts:
        how conversations are written. kept: lookup of cached features; None: there is none. positions: that the
        model supports; None: any. whole_frames: videos of more frames stay in their files
        (`Pictures.read_patches`); None: none do. frame_patches: patches of each frame or tile of a picture.
        pictures_apart: whether the model tells neighbouring pictures by the tokens between them.

        Raises ModelError for a tokenizer that cannot give labels, ConfigError for impossible bounds."""
        about_pictures = (written, videos, sounds, image_token_id)
        self._text = ConversationTokenizer(tokenizer, prompts, max_tokens, positions, *about_pictures)
        self._tokenizer = tokenizer
        self._image_token_id = image_token_id
        self._videos, self._max_tokens, self._written, self._about = videos, max_tokens, written, list(about)
        self._sounds, self._prompts, self._positions = sounds, prompts, positions
        self._frame_patches, self._pictures_apart = frame_patches, pictures_apart
        self.pictures = Pictures(
            image_processor, image_tokens, patches, min_pixels, max_pixels, videos, image_arguments, kept, whole_frames
        )

    def __call__(self, record: Record) -> Sample:
        """Decode and tokenise one record; one that asks becomes a prompt, without labels. DataError, with the record's
        place, when it cannot be used."""
        with located(record.where):
            clips = [] if self._sounds is None else self._sounds.decode(sounds_of(record))
            tokens, pictures = self._read(record, self.pictures.decode, clips)
            return self._assemble(record, tokens, pictures, clips)

    def measure(self, record: Record) -> Length:
        """Length of the sample that a call would give, from the headers of its files.

        No pixel is decoded, except to count the frames of a video whose header does not tell their number. Raises
        DataError as a call does, with the record's place, for defects that show without pixels."""
        with located(record.where):
            clips = [] if self._sounds is None else self._sounds.outline(sounds_of(record))
            tokens, outlines = self._read(record, self.pictures.outline, clips)
            length = self._length(record, tokens, outlines, clips)
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
            "pictures": [self._image_token_id, *self.pictures.about()],
            "max_tokens": self._max_tokens,
            "positions": None if self._positions is None else astuple(self._positions),
            **({} if self._prompts.system is None else {"system": self._prompts.system}),
            "family": self._about,
            **({} if self._sounds is None else {"sounds": list(self._sounds.about)}),
        }
        return sha256(json.dumps(about, sort_keys=True, default=str).encode()).hexdigest()

    def _length(self, record: Record, tokens: Tokens, outlines: Sequence[Outline], clips: Sequence[Clip]) -> Length:
        runs = self.pictures.runs(outlines)
        more = 0 if self._written is not None else sum(runs) - len(runs)  # else the prompt has them all
        frames = [patches for outline in outlines for patches in self._frame_patches(outline.grid)]
        return Length(
            vision=sum(runs),
            text=len(tokens.ids) + more,
            patches=sum(frames),
            pictures=len(outlines),
            squares=sum(patches**2 for patches in frames),
            sound=sum(clip.form.tokens for clip in clips),
            targets=int(tokens.target[1:].sum()),  # nothing predicts the first token
            encoded_bytes=sum(map(stored_bytes, (*record.media, *record.sounds))),
        )

    def _read(
        self, record: Record, look: Callable[[Sequence[Any]], list[Seen]], clips: Sequence[Clip]
    ) -> tuple[Tokens, list[Seen]]:
        """The conversation, with the tokens of the given clips, and its pictures.

        The text is read first, because its defects show soonest; but where it tells the times of frames, the pictures
        come first."""
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
        tokens = self._text.tokenize(record, clips, paces, shown)
        self._check(record, tokens, paces, shown)
        return tokens

    def _check(
        self, record: Record, tokens: Tokens, paces: Sequence[FrameTimes], shown: Sequence[PicturePatches | Outline]
    ) -> None:
        images = sum(self.pictures.runs(shown)) if shown else len(record.images)
        videos = sum(len(pace.times) for pace in paces) or len(record.media) - images
        counts = {"image": (self._image_token_id, images), "video": (None, videos)}
        if self._videos is not None:
            counts["video"] = (self._videos.token_id, videos)
        for kind, (token, wanted) in counts.items():
            placeholders = wanted if token is None else int((tokens.ids == token).sum())
            if placeholders != wanted:
                raise miscounted(kind, placeholders, wanted, self._tokenizer.decode([token]))
        if self._pictures_apart and self._written is None:
            self._check_apart(tokens.ids)
        if not record.asks and not tokens.target[1:].any():
            raise DataError("no target token: the chat template writes no answer for this conversation")

    def _check_apart(self, ids: np.ndarray) -> None:
        for token in (self._image_token_id, None if self._videos is None else self._videos.token_id):
            if token is not None and bool(((ids[1:] == token) & (ids[:-1] == token)).any()):
                raise DataError(
                    f"two pictures stand side by side, {self._tokenizer.decode([token])!r} behind "
                    f"{self._tokenizer.decode([token])!r}, and this model takes them for one. Write text between them, "
                    "or name a chat template that puts the model's tokens around each in data.chat_template"
                )

    def _assemble(
        self, record: Record, tokens: Tokens, pictures: list[PicturePatches], clips: Sequence[Clip]
    ) -> Sample:
        """Repeat each placeholder to the length of its picture."""
        kinds = (tokens.ids == self._image_token_id).astype(np.int64)
        if self._videos is not None:
            kinds[tokens.ids == self._videos.token_id] = VIDEO
        repeats = np.ones(len(tokens.ids), dtype=np.int64)
        if self._written is None:  # else the prompt has them all
            repeats[kinds > 0] = self.pictures.runs(pictures)
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
