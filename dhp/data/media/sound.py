"""Decodes audio to mono waves at a model's sample rate."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np

from dhp.core.batch import ProcessorOutput
from dhp.core.errors import DataError
from dhp.data.media.sources import File, decoding, name_of, open_media, pyav

MAX_SECONDS = 3600  # of a clip: all of it has to fit into memory
# What FFmpeg may take a file for. Playlists are left out: they name other files and addresses, which it would open.
_CONTAINERS = "wav,w64,flac,mp3,aac,ogg,aiff,caf,au,amr,mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,asf"
_STREAMED = 0x7FFF_0000  # a size from here on means that the writer did not know it yet
_EXACT_CONTAINERS = {"wav", "flac"}  # whose headers say how many samples there are


@dataclass(frozen=True)
class Clip:
    """The model's input of an audio file: features float32 [frames, bins]; None: only the header was read."""

    form: ProcessorOutput
    features: np.ndarray | None = None


@dataclass(frozen=True)
class AudioPreprocessing:
    """Audio preprocessing of one model.

    token_id: its placeholder. rate: samples a second. shortest, longest: samples of the shortest clip, and of the
    longest, of which a longer one would be cut; None: any.

    features: waves of one sample's clips → float32 [frames, bins] each. forms: samples in these waves → forms.

    about: all that decides a clip's tokens, except its file."""

    token_id: int
    rate: int
    shortest: int
    features: Callable[[Sequence[np.ndarray]], list[np.ndarray]]
    forms: Callable[[Sequence[int]], list[ProcessorOutput]]
    about: Sequence[Any] = ()
    longest: int | None = None

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
            if self.longest is not None and count > self.longest:
                raise DataError(
                    f"audio {name_of(file)} is {count / self.rate:.1f} s long, and of more than "
                    f"{self.longest / self.rate:.1f} s the model's feature extractor drops the rest. Cut it"
                )
        return self.forms(samples)


def read_sound(file: File, rate: int) -> np.ndarray:
    """Decode a file's first stream of sound: float32 [samples], `rate` a second, the mean of its channels.

    DataError names the file and the reason: missing, empty, broken, no sound, too long, cut off."""
    with _opened(file) as (container, stream):
        declared, own = _declared_samples(container, stream), stream.codec_context.sample_rate
        resample = pyav().AudioResampler(format="fltp", rate=rate)
        pieces, count = [], 0
        for frame in _frames(container, stream, file):
            count += frame.samples
            pieces += [_mixed(piece) for piece in resample.resample(frame)]
        pieces += [_mixed(piece) for piece in resample.resample(None)] if count else []
    _check_whole(count, declared, file)
    wave = np.zeros(_resampled(count, own, rate), np.float32)
    if pieces:  # of a few samples the resampler gives nothing; the silence is then found too short
        found = np.concatenate(pieces)[: len(wave)]
        wave[: len(found)] = found
    return wave


def count_samples(file: File, rate: int) -> int:
    """The number of samples that `read_sound` gives: from the header where it says, else by decoding the file.

    Raises DataError as `read_sound` does, for what shows."""
    with _opened(file) as (container, stream):
        declared, own = _declared_samples(container, stream), stream.codec_context.sample_rate
        if declared is None:
            declared = sum(frame.samples for frame in _frames(container, stream, file))
            _check_whole(declared, None, file)
        return _resampled(declared, own, rate)


def _resampled(samples: int, own: int, rate: int) -> int:
    return -(-samples * rate // own)


def _mixed(frame: Any) -> np.ndarray:
    return frame.to_ndarray().mean(axis=0, dtype=np.float32)


@contextmanager
def _opened(file: File) -> Iterator[tuple[Any, Any]]:
    """The container and its first stream of sound."""
    name = name_of(file)
    with open_media(file, "audio") as content:
        _check_riff(content, name)
        with decoding(f"audio {name}"):
            container = pyav().open(content, options={"format_whitelist": _CONTAINERS}, metadata_errors="ignore")
        with container:
            stream = next(iter(container.streams.audio), None)
            if stream is None:
                raise DataError(f"audio {name} has no stream of sound")
            if stream.codec_context is None or not stream.codec_context.sample_rate:
                raise DataError(f"audio {name} has a stream of an unknown kind")
            _check_length(_seconds(container, stream), name)
            yield container, stream


def _check_riff(content: BinaryIO, name: str) -> None:
    """FFmpeg reads a wave that is cut off as a shorter one. Raises DataError for such a file."""
    head = content.read(8)
    size = content.seek(0, os.SEEK_END)
    content.seek(0)
    declared = int.from_bytes(head[4:8], "little") + 8
    if head[:4] == b"RIFF" and size < declared < _STREAMED:
        raise DataError(f"audio {name} is cut off: it has {size} bytes, and its header says {declared}. Copy it again")


def _declared_samples(container: Any, stream: Any) -> int | None:
    """Samples by the header; None where it does not say exactly."""
    exact = stream.codec_context.name.startswith("pcm_") or stream.codec_context.name == "flac"
    if container.format.name not in _EXACT_CONTAINERS or not exact or not stream.duration:
        return None
    return int(stream.duration * stream.time_base * stream.codec_context.sample_rate)


def _seconds(container: Any, stream: Any) -> float:
    """By the header; 0 where it does not say."""
    if stream.duration:
        return float(stream.duration * stream.time_base)
    return float(container.duration or 0) / pyav().time_base


def _frames(container: Any, stream: Any, file: File) -> Iterator[Any]:
    """Decoded frames. Raises DataError for damage, and where they go on for too long."""
    name, count, most = name_of(file), 0, MAX_SECONDS * stream.codec_context.sample_rate
    frames = container.decode(stream)
    while True:
        with decoding(f"audio {name}"):
            frame = next(frames, None)
        if frame is None:
            return
        count += frame.samples
        if count > most:
            _check_length(count / stream.codec_context.sample_rate, name)
        yield frame


def _check_length(seconds: float, name: str) -> None:
    if seconds > MAX_SECONDS:
        raise DataError(
            f"audio {name} is {seconds:.0f} s long or longer, more than the {MAX_SECONDS} that are decoded. Cut it"
        )


def _check_whole(count: int, declared: int | None, file: File) -> None:
    if not count:
        raise DataError(f"audio {name_of(file)} has no sound in it (0 samples)")
    if declared is not None and count != declared:
        raise DataError(
            f"audio {name_of(file)} is cut off: it has {count} samples, and its header says {declared}. Copy it again"
        )
