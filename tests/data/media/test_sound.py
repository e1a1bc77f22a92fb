"""Waves of a sound file: how many samples, at which rate, and what is wrong with files that have none."""

from pathlib import Path

import av
import numpy as np
import pytest

from dhp.core.errors import DataError
from dhp.data.media import sound
from dhp.data.media.sound import count_samples, read_sound
from dhp.data.media.sources import Blob
from tests.helpers.tiny_omni import RATE, make_wave, save_wave

CODECS = {"flac": "flac", "mp3": "libmp3lame", "ogg": "libopus", "m4a": "aac"}


def encode(path: Path, samples: np.ndarray, rate: int) -> Path:
    """A file of the codec that its ending asks for, mono."""
    with av.open(str(path), "w") as container:
        stream = container.add_stream(CODECS[path.suffix[1:]], rate=rate)
        stream.layout = "mono"
        frame = av.AudioFrame.from_ndarray(samples.T, format="s16", layout="mono")
        frame.sample_rate = rate
        resampler = av.AudioResampler(format=stream.format, layout="mono", rate=rate, frame_size=stream.frame_size or 0)
        for piece in [*resampler.resample(frame), *resampler.resample(None)]:
            container.mux(stream.encode(piece))
        container.mux(stream.encode())
    return path


def test_samples_are_those_of_the_file(tmp_path):
    wave = make_wave(0.1, seed=1)
    path = save_wave(tmp_path / "a.wav", wave)
    assert np.array_equal(read_sound(path, RATE), (wave[:, 0] / 2**15).astype(np.float32))
    assert np.array_equal(read_sound(Blob("a", path.read_bytes()), RATE), read_sound(path, RATE))


def test_channels_become_their_mean(tmp_path):
    wave = make_wave(0.1, seed=1, channels=2)
    wave[:, 1] = 0
    found = read_sound(save_wave(tmp_path / "a.wav", wave), RATE)
    assert np.allclose(found, wave[:, 0] / 2**16, atol=1e-7)


@pytest.mark.parametrize("rate", [8_000, 22_050, 44_100])
def test_another_rate_is_brought_to_the_models(tmp_path, rate):
    seconds = np.arange(round(0.25 * rate)) / rate
    tone = (20_000 * np.sin(2 * np.pi * 440 * seconds)).astype(np.int16)[:, None]
    found = read_sound(save_wave(tmp_path / "a.wav", tone, rate), RATE)
    assert len(found) == -(-len(tone) * RATE // rate) == count_samples(tmp_path / "a.wav", RATE)
    wanted = 20_000 / 2**15 * np.sin(2 * np.pi * 440 * np.arange(len(found)) / RATE)
    assert np.abs(found - wanted)[200:-200].max() < 0.01  # but for the filter's ends


@pytest.mark.parametrize("ending", CODECS)
def test_every_codec_is_read_and_counted(tmp_path, ending):
    wave = make_wave(0.3, seed=2, rate=44_100)
    path = encode(tmp_path / f"a.{ending}", wave, 48_000 if ending == "ogg" else 44_100)
    found = read_sound(path, RATE)
    assert count_samples(path, RATE) == len(found) and abs(len(found) - 0.3 * RATE) < 0.12 * RATE
    assert 0.3 < np.abs(found).max() < 1


@pytest.mark.parametrize("ending", ["wav", "flac"])
def test_a_header_that_tells_is_believed(tmp_path, monkeypatch, ending):
    wave = make_wave(0.2, seed=3, rate=22_050)
    path = tmp_path / f"a.{ending}"
    (save_wave if ending == "wav" else encode)(path, wave, 22_050)
    length = len(read_sound(path, RATE))
    monkeypatch.setattr(sound, "_frames", None)
    assert count_samples(path, RATE) == length


def test_a_file_that_is_cut_off(tmp_path):
    path = save_wave(tmp_path / "a.wav", make_wave(0.5, seed=1))
    path.write_bytes(path.read_bytes()[:8000])
    for look in (read_sound, count_samples):
        with pytest.raises(DataError, match=r"a\.wav is cut off: it has 8000 bytes, and its header says 16044. Copy"):
            look(path, RATE)


def test_a_flac_that_is_cut_off(tmp_path):
    path = encode(tmp_path / "a.flac", make_wave(2.0, seed=1), RATE)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(
        DataError, match=r"a\.flac (is cut off: it has \d+ samples, and its header says 32000|cannot be)"
    ):
        read_sound(path, RATE)


def test_a_wave_that_was_streamed_has_no_size(tmp_path):
    path = save_wave(tmp_path / "a.wav", make_wave(0.5, seed=1))
    whole, content = read_sound(path, RATE), bytearray(path.read_bytes())
    content[4:8] = content[40:44] = b"\xff\xff\xff\xff"
    path.write_bytes(content)
    assert np.array_equal(read_sound(path, RATE), whole) and count_samples(path, RATE) == len(whole)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "is empty"),
        (b"RIFF" + bytes(60), "cannot be decoded"),
        (b"no sound at all", "cannot be decoded"),
        (b"#EXTM3U\n#EXTINF:1,\nfile:///etc/hostname\n", "cannot be decoded"),  # which would open another file
        (b"ffconcat version 1.0\nfile /etc/hostname\n", "cannot be decoded"),
    ],
)
def test_files_without_sound(tmp_path, content, reason):
    (tmp_path / "a.wav").write_bytes(content)
    for look in (read_sound, count_samples):
        with pytest.raises(DataError, match=rf"audio .*a\.wav {reason}"):
            look(tmp_path / "a.wav", RATE)


def test_a_wave_of_no_samples(tmp_path):
    path = save_wave(tmp_path / "a.wav", make_wave(0.0, seed=1))
    for look in (read_sound, count_samples):
        with pytest.raises(DataError, match=r"a\.wav has no sound in it"):
            look(path, RATE)


def test_a_video_without_sound(tmp_path, write_video):
    with pytest.raises(DataError, match=r"v\.mp4 has no stream of sound"):
        read_sound(write_video(tmp_path / "v.mp4"), RATE)


def test_a_file_that_is_too_long(tmp_path, monkeypatch):
    monkeypatch.setattr(sound, "MAX_SECONDS", 1)
    told = save_wave(tmp_path / "a.wav", make_wave(1.5, seed=1))
    untold = encode(tmp_path / "a.mp3", make_wave(3.0, seed=1), RATE)
    for path in (told, untold):
        for look in (read_sound, count_samples):
            with pytest.raises(DataError, match="s long or longer, more than the 1 that are decoded. Cut it"):
                look(path, RATE)


@pytest.mark.parametrize("rate", [8000, 44100])
def test_a_wave_too_short_to_resample_is_as_long_as_measured(tmp_path, rate):
    path = save_wave(tmp_path / "a.wav", np.full((1, 1), 1000, np.int16), rate)
    wave = read_sound(path, RATE)
    assert len(wave) == count_samples(path, RATE) == -(-RATE // rate) and not wave.any()
