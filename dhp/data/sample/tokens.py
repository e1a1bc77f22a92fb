"""Tokenizes conversations with their answers as targets; embeds sounds' places."""

from __future__ import annotations

import json
import threading
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np

from dhp.config.data import DataConfig
from dhp.core.errors import DataError, ModelError
from dhp.core.transformers_private import encodes_as
from dhp.data.media.frames import FrameTimes
from dhp.data.media.sound import Clip
from dhp.data.media.sources import File, name_of
from dhp.data.read.records import Record
from dhp.data.sample.chat import Rendered, render, replace_each, to_messages
from dhp.data.sample.picture_inputs import ModelMedia, Outline, PicturePatches
from dhp.data.sample.sample import check_characters, longest_token
from dhp.data.sample.template_check import find_answer_end

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


NO_TOWER = "the model has no audio tower that is read here. Leave samples with sound out of its data"
NO_ACTORS = (
    "audio.num_actors=0, so this run hears nothing. Set audio.num_actors=1, if the model has an audio tower, or leave "
    "samples with sound out of the data"
)


def sounds_of(record: Record) -> tuple[File, ...]:
    """Its clips. Raises DataError where a user's turn has their tag, and none is named: a key was mistyped."""
    tags = _tags(record)
    if tags and not record.sounds:
        raise DataError(f"{tags} <audio> tags in the human turns, but 0 audios. Name them under 'audio' or 'audios'")
    return record.sounds


def refuse_sound(record: Record, why: str = NO_ACTORS) -> None:
    """Raises DataError where there is sound, or a tag of it: without it such a sample would be trained on as another
    one. why: the run takes no audio."""
    if record.sounds:
        raise DataError(f"audio {name_of(record.sounds[0])}, but {why}")
    if tags := _tags(record):
        raise DataError(f"{tags} <audio> tags in the human turns, but {why}")


def _tags(record: Record) -> int:
    texts = [part for turn in record.turns if turn.role == "user" for part in turn.parts if isinstance(part, str)]
    return sum(text.count("<audio>") for text in texts)


_BESIDE_A_CUT = 64  # tokens: where a text is cut, its last word may become other tokens
_DECOMPOSED = 4  # characters at most that normal form C makes one of

# Templates are compiled once and then shared, and one that tracks its answers is not reentrant.
# A lock of the module leaves the preprocessor itself picklable. Images are decoded outside of it.
_TEXT = threading.Lock()

Characters = Callable[[int], tuple[int, int]]  # of a token by its number: where it begins and ends in the text


@dataclass(frozen=True)
class Tokens:
    """A tokenised conversation with one token for each image, and which of its tokens are targets."""

    ids: np.ndarray  # int64 [tokens]
    target: np.ndarray  # bool [tokens]


class ConversationTokenizer:
    """Tokenizes the conversations of one model. Safe to call from several threads."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, media: ModelMedia, data: DataConfig) -> None:
        """Raises ModelError for a tokenizer that cannot give labels."""
        from transformers import PreTrainedTokenizerFast

        if not tokenizer.is_fast:
            raise ModelError(f"tokenizer {tokenizer.name_or_path!r} gives no offsets; a fast tokenizer is needed")
        if tokenizer.chat_template is None:
            raise ModelError(f"tokenizer {tokenizer.name_or_path!r} has no chat template, so answers have no place")
        self._tokenizer, self._media, self._data = tokenizer, media, data
        self._written, self._videos, self._sounds = media.written, media.videos, media.sounds
        image = media.written[0] if media.written is not None else self._token(media.image_token_id)
        videos = media.videos
        video = None if videos is None else videos.whole.mark if videos.whole else self._token(videos.token_id)
        self._marks = {kind: mark for kind, mark in (("image", image), ("video", video)) if mark is not None}
        tokenizer("", verbose=False)  # sets the backend's truncation, padding and special tokens as each call does
        plain = encodes_as(tokenizer, PreTrainedTokenizerFast)
        self._backend = tokenizer.backend_tokenizer if plain else None
        self._longest = longest_token(json.loads(tokenizer.backend_tokenizer.to_str()))
        self._end: tuple[int | None] | None = None  # sought with the first answer whose span has no end
        self._special = frozenset(i for i, token in tokenizer.added_tokens_decoder.items() if token.special)

    def _token(self, number: int | None) -> str | None:
        return None if number is None else str(self._tokenizer.convert_ids_to_tokens(number))

    def tokenize(
        self,
        record: Record,
        clips: Sequence[Clip],
        paces: Sequence[FrameTimes],
        shown: Sequence[PicturePatches | Outline],
    ) -> Tokens:
        """clips: of its audio. paces: of the videos whose times the prompt has. shown: pictures that the prompt shows
        in their own way. Raises DataError."""
        if record.written is not None:
            return self._plain_tokens(record.written)
        with _TEXT:
            messages = to_messages(record.turns, self._data.system_prompt)
            how = (self._data.learn_empty_thoughts, record.learned, self._marks)
            rendered = render(self._tokenizer, messages, *how)
            check_characters(
                rendered.text, len(record.media), self._longest, self._data.max_tokens, self._media.positions
            )
            rendered = self._with_times(rendered, paces) if paces else rendered
            rendered = self._with_pictures(rendered, shown) if shown else rendered
            rendered = self._with_sounds(rendered, clips) if self._sounds is not None else rendered
            ids, characters = self._encode(rendered.text)
            for start, _ in rendered.spans:
                ids, characters = self._cut_newlines(ids, characters, rendered.text, start)
        return Tokens(np.array(ids, dtype=np.int64), self._targets(ids, characters, rendered))

    def _plain_tokens(self, text: str) -> Tokens:
        """Plain text between the tokens that the tokenizer begins a text with and the one that ends it, cut after
        max_tokens; all of it is learned."""
        most, end = self._data.max_tokens, self._tokenizer.eos_token_id
        if most is not None and self._longest is not None:  # what is cut anyway would take memory as tokens
            text = text[: _DECOMPOSED * self._longest * (most + _BESIDE_A_CUT)]
        with _TEXT:
            ids = self._tokenizer(text, verbose=False)["input_ids"]
        if end is not None and ids[-1:] != [end]:
            ids = [*ids, end]
        return Tokens(np.array(ids[:most], dtype=np.int64), np.ones(len(ids[:most]), dtype=bool))

    def _with_pictures(self, rendered: Rendered, shown: Sequence[PicturePatches | Outline]) -> Rendered:
        """Replace the placeholder of each picture by what the family's processor writes for it: in the text, as that
        processor does, because tokens are not always those of the pieces."""
        assert self._written is not None
        for kind, mark in self._marks.items():  # images first: what stands for a video may have their placeholder
            own = [self._written[1](one.grid) for one in shown if (one.pace is None) == (kind == "image")]
            found = rendered.text.count(mark)
            if found != len(own):
                raise miscounted(kind, found, len(own), mark)
            rendered = replace_each(rendered, mark, own)
        return rendered

    def _with_sounds(self, rendered: Rendered, clips: Sequence[Clip]) -> Rendered:
        assert self._sounds is not None
        placeholder = self._tokenizer.convert_ids_to_tokens(self._sounds.token_id)
        found = rendered.text.count(placeholder)
        if found != len(clips):
            raise miscounted("audio clip", found, len(clips), placeholder)
        forms = [clip.form for clip in clips]
        return replace_each(rendered, placeholder, [form.written or placeholder * form.tokens for form in forms])

    def _with_times(self, rendered: Rendered, paces: Sequence[FrameTimes]) -> Rendered:
        """Replace the placeholder of each video by one for each step in time. This is done in the text, not among its
        tokens, because the text before a time may share a token with it."""
        videos, name = self._videos, self._tokenizer.convert_ids_to_tokens
        assert videos is not None and videos.step_tokens is not None  # or no prompt has times
        token, first, last = map(name, (videos.token_id, *videos.step_tokens))
        found = rendered.text.count(token)
        if found != len(paces):
            raise miscounted("video", found, len(paces), token)

        def show(pace: FrameTimes) -> str:
            texts = (videos.step_text(*times) for times in zip(pace.times, pace.firsts, strict=True))
            return "".join(f"{before}{first}{token}{last}{behind}" for before, behind in texts)

        return replace_each(rendered, token, [show(pace) for pace in paces])

    def _encode(self, text: str) -> tuple[list[int], Characters]:
        """Token ids, and where each is in the text. A backend's places are read one by one: all of them take a tenth of
        the time that it took for the text."""
        if self._backend is not None:  # the same, without what the call does around it
            encoding = self._backend.encode(text, add_special_tokens=False)
            return encoding.ids, encoding.token_to_chars
        called = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        return called["input_ids"], called["offset_mapping"].__getitem__

    def _cut_newlines(
        self, ids: list[int], characters: Characters, text: str, start: int
    ) -> tuple[list[int], Characters]:
        """Where an answer begins with newlines and the prompt before it ends with some, tokens as the model meets them
        when it answers: those of the prompt, then those of the answer, and none of both."""
        if text[start - 1 : start + 1] != "\n\n":
            return ids, characters
        first = last = _first_beyond(start, len(ids), characters)
        while last < len(ids) and not text[slice(*characters(last))].strip("\n"):
            last += 1
        if last == first or characters(first)[0] == start:
            return ids, characters
        begin, end = characters(first)[0], characters(last - 1)[1]
        cut_ids, places = [], []
        for a, b in ((begin, start), (start, end)):
            some, within = self._encode(text[a:b])
            cut_ids += some
            places += [(within(i)[0] + a, within(i)[1] + a) for i in range(len(some))]
        if sum(b - a for a, b in places) != end - begin:
            return ids, characters  # this tokenizer begins each text with a space
        outside = (map(characters, range(first)), places, map(characters, range(last, len(ids))))
        return [*ids[:first], *cut_ids, *ids[last:]], list(chain.from_iterable(outside)).__getitem__

    def _targets(self, ids: list[int], characters: Characters, rendered: Rendered) -> np.ndarray:
        """bool [tokens]: tokens that have characters of an answer, up to and with its end-of-turn token. The first may
        begin before it: words of most vocabularies have the space before them."""
        target = np.zeros(len(ids), dtype=bool)
        for start, stop in rendered.spans:
            last = _first_from(stop, len(ids), characters)
            first = _first_beyond(start, len(ids), characters) if start < stop else last
            last = self._end_of_turn(ids, characters, rendered.text, first, last, stop)
            if self._data.learn_newline and last < len(ids):
                last += rendered.text[slice(*characters(last))] == "\n"
            target[first:last] = True
        return target

    def _end_of_turn(self, ids: list[int], characters: Characters, text: str, first: int, last: int, stop: int) -> int:
        """Move `last` (exclusive) so that the answer, which ends at `stop`, ends with its end-of-turn token.

        Templates write a newline after that token, which nothing should learn to say; and some leave
        the token itself outside their generation block, which would teach the model never to stop."""
        at = last
        while at > first and not text[characters(at - 1)[1] : stop].strip():
            if ids[at - 1] in self._special:
                return at
            at -= 1
        if last < len(ids) and ids[last] in (self._tokenizer.eos_token_id, self._answer_end()):
            return last + 1
        return last

    def _answer_end(self) -> int | None:
        if self._end is None:
            self._end = (find_answer_end(self._tokenizer),)
        return self._end[0]


def _first_from(place: int, count: int, characters: Characters) -> int:
    """The first of `count` tokens that begins at a place of the text or behind it; `count`: none does."""
    return bisect_left(range(count), place, key=lambda token: characters(token)[0])


def _first_beyond(place: int, count: int, characters: Characters) -> int:
    """The first of `count` tokens that ends behind a place of the text; `count`: none does."""
    return bisect_right(range(count), place, key=lambda token: characters(token)[1])


def miscounted(kind: str, placeholders: int, wanted: int, token: str) -> DataError:
    """The error for a text whose placeholders are not as many as its pictures or clips."""
    return DataError(
        f"{placeholders} {kind} placeholder tokens for {wanted} {kind}s: the text itself holds {token!r}, or the chat "
        f"template drops {kind}s"
    )
