"""Audio files to the model's input features, or, from their headers alone, to their number of tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dhp.core.batch import ProcessorOutput
from dhp.core.errors import DataError
from dhp.data.media.sound import count_samples, read_sound
from dhp.data.media.sources import File, name_of
from dhp.data.read.records import Record


@dataclass(frozen=True)
class Clip:
    """The model's input of an audio file: features float32 [frames, bins]; None: only the header was read."""

    form: ProcessorOutput
    features: np.ndarray | None = None


@dataclass(frozen=True)
class AudioPreprocessing:
    """Audio preprocessing of one model.

    token_id: its placeholder. rate: samples a second. shortest: samples of the shortest clip.

    features: waves of one sample's clips → float32 [frames, bins] each. forms: samples in these waves → forms.

    about: all that decides a clip's tokens, except its file.
    """

    token_id: int
    rate: int
    shortest: int
    features: Callable[[Sequence[np.ndarray]], list[np.ndarray]]
    forms: Callable[[Sequence[int]], list[ProcessorOutput]]
    about: Sequence[Any] = ()

    def decode(self, files: Sequence[File]) -> list[Clip]:
        """The clips of one sample. Raises DataError for a file that cannot be used."""
        waves = [read_sound(file, self.rate) for file in files]
        forms = self._forms(files, [len(wave) for wave in waves])
        return [Clip(form, found) for form, found in zip(forms, self.features(waves) if waves else (), strict=True)]

    def outline(self, files: Sequence[File]) -> list[Clip]:
        """The clips that `decode` would give, without features. Raises DataError as it does, as far as headers show."""
        return [Clip(form) for form in self._forms(files, [count_samples(file, self.rate) for file in files])]

    def _forms(self, files: Sequence[File], samples: Sequence[int]) -> list[ProcessorOutput]:
        for file, count in zip(files, samples, strict=True):
            if count < self.shortest:
                raise DataError(
                    f"audio {name_of(file)} is {count} samples long at {self.rate} a second; the model's features need "
                    f"{self.shortest}. Leave it out"
                )
        return self.forms(samples)


NO_TOWER = "the model has no audio tower. Leave samples with sound out of its data"
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
