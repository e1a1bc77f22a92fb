"""Turns a record into a sample."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import astuple, replace
from hashlib import sha256
from math import nan
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import transformers

from dhp.config.data import DataConfig
from dhp.core.batch import IGNORED, SOUND, VIDEO
from dhp.core.errors import DataError
from dhp.core.preferences import Mark
from dhp.data.media.frames import FrameTimes
from dhp.data.media.sound import Clip
from dhp.data.media.sources import stored_bytes
from dhp.data.read.records import Record, located
from dhp.data.sample.picture_inputs import ModelMedia, Outline, PicturePatches, Pictures
from dhp.data.sample.sample import Length, Sample, check_length, joined_sides
from dhp.data.sample.tokens import ConversationTokenizer, Tokens, miscounted, refuse_sound, sounds_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Seen = TypeVar("Seen", PicturePatches, Outline)


class Preprocessor:
    """Turns records into samples for one model. Safe to call from several threads. pictures: how images and videos are
    read."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, media: ModelMedia, data: DataConfig) -> None:
        """media: what the model takes. data: the run's section; chat_template is the tokenizer's already.

        Raises ModelError for a tokenizer that cannot give labels, ConfigError for impossible bounds."""
        self._text = ConversationTokenizer(tokenizer, media, data)
        self._tokenizer, self._media, self._data = tokenizer, media, data
        self._videos, self._written, self._sounds = media.videos, media.written, media.sounds
        self.pictures = Pictures(media, data)
        self.references: Callable[[Record], tuple[float, float]] | None = None  # of both sides of a preference

    def __call__(self, record: Record) -> Sample:
        """Decode and tokenise one record; one that asks becomes a prompt, without labels. DataError, with the record's
        place, when it cannot be used."""
        with located(record.where):
            clips = [] if self._sounds is None else self._sounds.decode(sounds_of(record))
            tokens, pictures = self._read(record, self.pictures.decode, clips)
            first = self._assemble(record, tokens, pictures, clips)
            return first if record.other is None else self._compared(record, record.other, first, pictures, clips)

    def _compared(
        self, record: Record, other: Record, first: Sample, pictures: list[PicturePatches], clips: list[Clip]
    ) -> Sample:
        """A preference: what both sides show is decoded once."""
        again = other.media == record.media and other.sounds == record.sounds
        if not again:
            clips = [] if self._sounds is None else self._sounds.decode(sounds_of(other))
        tokens, shown = self._read(other, (lambda _: pictures) if again else self.pictures.decode, clips)
        second = self._assemble(other, tokens, shown, clips)
        if np.array_equal(first.input_ids, second.input_ids) and again and record.liked is None:
            raise DataError("both sides are the same tokens, so that nothing is preferred. Leave such rows out")
        if again:
            second = replace(second, pixels=(), clips=(), features=(), again=True)
        references = self.references(record) if self.references is not None else (nan, nan)
        marks = [Mark(*of, first=number == 0) for number, of in enumerate(zip(record.sides, references))]
        whole = joined_sides(replace(first, mark=marks[0]), replace(second, mark=marks[1]))
        self._check_row(len(whole.input_ids))
        return whole

    def _check_row(self, tokens: int) -> None:
        most = self._data.max_tokens
        if most is not None and tokens > most:
            raise DataError(
                f"{tokens} tokens of both sides are more than data.max_tokens={most}, and both stand in one row. Raise "
                "it, shorten them, or leave the row out by data.on_bad_sample=skip"
            )

    def measure(self, record: Record) -> Length:
        """Length of the sample that a call would give, from the headers of its files.

        No pixel is decoded, except to count the frames of a video whose header does not tell their number. Raises
        DataError as a call does, with the record's place, for defects that show without pixels."""
        with located(record.where):
            clips = [] if self._sounds is None else self._sounds.outline(sounds_of(record))
            tokens, outlines = self._read(record, self.pictures.outline, clips)
            length = self._length(record, tokens, outlines, clips)
            check_length(length, self._data.max_tokens, self._media.positions)
            return length if record.other is None else self._measured(record, record.other, length, outlines, clips)

    def _measured(
        self, record: Record, other: Record, first: Length, outlines: list[Outline], clips: list[Clip]
    ) -> Length:
        """Of both sides: tokens of both, and what both show once."""
        again = other.media == record.media and other.sounds == record.sounds
        if not again:
            clips = [] if self._sounds is None else self._sounds.outline(sounds_of(other))
        tokens, shown = self._read(other, (lambda _: outlines) if again else self.pictures.outline, clips)
        second = self._length(other, tokens, shown, clips)
        check_length(second, self._data.max_tokens, self._media.positions)
        both = Length(*map(sum, zip(first, second)))
        self._check_row(both.text)
        once = {name: getattr(both, name) for name in ("text", "targets", "sound", "pairs")}
        return first._replace(**once) if again else both

    def fingerprint(self) -> str:
        """Hex digest of all that decides lengths, except the records: equal digests mean equal lengths."""
        tokenizer = self._tokenizer
        backend = json.loads(tokenizer.backend_tokenizer.to_str())
        about = {
            "transformers": transformers.__version__,
            # A call sets the other two, whatever the tokenizer's file says of them.
            "tokenizer": {key: value for key, value in backend.items() if key not in ("truncation", "padding")},
            "template": [tokenizer.chat_template, tokenizer.special_tokens_map],
            "pictures": [self._media.image_token_id, *self.pictures.about()],
            "max_tokens": self._data.max_tokens,
            "positions": None if self._media.positions is None else astuple(self._media.positions),
            **({} if self._data.system_prompt is None else {"system": self._data.system_prompt}),
            "family": list(self._media.about),
            **({} if self._sounds is None else {"sounds": list(self._sounds.about)}),
        }
        return sha256(json.dumps(about, sort_keys=True, default=str).encode()).hexdigest()

    def _length(self, record: Record, tokens: Tokens, outlines: Sequence[Outline], clips: Sequence[Clip]) -> Length:
        runs = self.pictures.runs(outlines)
        more = 0 if self._written is not None else sum(runs) - len(runs)  # else the prompt has them all
        text = len(tokens.ids) + more
        frames = [patches for outline in outlines for patches in self._media.frame_patches(outline.grid)]
        return Length(
            vision=sum(runs),
            text=text,
            patches=sum(frames),
            pictures=len(outlines),
            squares=sum(patches**2 for patches in frames),
            sound=sum(clip.form.tokens for clip in clips),
            targets=int(tokens.target[1:].sum()),  # nothing predicts the first token
            pairs=text**2,
            encoded_bytes=sum(map(stored_bytes, (*record.media, *record.sounds))),
        )

    def _read(
        self, record: Record, look: Callable[[Sequence[Any]], list[Seen]], clips: Sequence[Clip]
    ) -> tuple[Tokens, list[Seen]]:
        """The conversation, with the tokens of the given clips, and its pictures.

        The text is read first, because its defects show soonest; but where it tells the times of frames, the pictures
        come first."""
        if self._sounds is None:
            refuse_sound(record, self._media.no_audio)
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
        moving = None if self._videos is None else self._videos.token_id
        images = sum(self.pictures.runs([one for one in shown if one.pace is None or moving is None]))
        images = images if shown else len(record.images)
        videos = sum(len(pace.times) for pace in paces) or len(record.media) - images
        if shown:
            videos = sum(self.pictures.runs(shown)) - images
        for kind, token, wanted in (("image", self._media.image_token_id, images), ("video", moving, videos)):
            placeholders = wanted if token is None else int((tokens.ids == token).sum())
            if placeholders != wanted:
                raise miscounted(kind, placeholders, wanted, self._tokenizer.decode([token]))
        if self._media.pictures_apart and self._written is None:
            self._check_apart(tokens.ids)
        if not record.asks and not tokens.target[1:].any():
            raise DataError("no target token: the chat template writes no answer for this conversation")

    def _check_apart(self, ids: np.ndarray) -> None:
        for token in (self._media.image_token_id, None if self._videos is None else self._videos.token_id):
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
        kinds = (tokens.ids == self._media.image_token_id).astype(np.int64)
        if self._videos is not None:
            kinds[tokens.ids == self._videos.token_id] = VIDEO
        repeats = np.ones(len(tokens.ids), dtype=np.int64)
        if self._written is None:  # else the prompt has them all
            repeats[kinds > 0] = self.pictures.runs(pictures)
        check_length(
            Length(int(repeats[kinds > 0].sum()), int(repeats.sum())), self._data.max_tokens, self._media.positions
        )
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
