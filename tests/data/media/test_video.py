"""Videos and the frames that are read of them."""

import struct
from dataclasses import replace
from fractions import Fraction
from types import SimpleNamespace

import av
import numpy as np
import pytest
from PIL import Image

from dhp.core.errors import DataError
from dhp.data.media import video
from dhp.data.media import video as video_parts
from dhp.data.media.frames import FrameSampling, LongVideo, VideoExtent, VideoLength, extent_of_images, map_images
from dhp.data.media.sources import Blob, Frames, Settings, SizedImage, Video, files_of
from dhp.data.media.video import _frame_size, map_frames, read_extent, read_groups, read_in_order, read_length
from dhp.data.read.records import Record, Turn


@pytest.mark.parametrize(
    "fps, most, group, total, rate, expected",
    [
        (2.0, 768, 2, 12, 4.0, [0, 2, 4, 6, 8, 10]),
        (2.0, 4, 2, 12, 4.0, [0, 3, 6, 9]),
        (2.0, 5, 2, 12, 4.0, [0, 3, 6, 9]),  # whole groups
        (100.0, 768, 2, 7, 4.0, [0, 1, 2, 3, 4, 5]),  # the most that there are, in whole groups
        (0.1, 768, 2, 100, 25.0, [0, 25, 50, 75]),  # never fewer than four
        (2.0, 768, 2, 3, 4.0, [0, 1]),
        (2.0, 768, 2, 1, 4.0, [0]),
    ],
)
def test_frames_are_taken_evenly(fps, most, group, total, rate, expected):
    assert FrameSampling(fps, most, group).indices(total, rate).tolist() == expected


def test_groups_of_frames_in_order_and_the_seconds_between_them(tmp_path, write_video):
    path = write_video(tmp_path / "v.mp4", frames=12, rate=4)
    shades, pace = map_frames(
        path, FrameSampling(2.0, 768, 2), lambda group: [int(np.asarray(i).mean()) for i in group]
    )
    assert np.allclose(shades, [[20, 40], [60, 80], [100, 120]], atol=4)
    assert pace.seconds == pytest.approx(1.0)  # two frames, two a second
    assert pace.times == (0.25, 1.25, 2.25)  # frames 0 and 2, 4 and 6, 8 and 10, four a second
    in_memory, _ = map_frames(Blob("v", path.read_bytes()), FrameSampling(2.0, 768, 2), len)
    assert in_memory == [2, 2, 2]


@pytest.mark.parametrize("ending", ["mp4", "mkv", "avi"])  # some containers say how many frames they hold
def test_the_number_of_frames_is_found(tmp_path, write_video, ending):
    path = write_video(tmp_path / f"v.{ending}", frames=12, rate=4)
    assert map_frames(path, FrameSampling(2.0, 768, 2), len)[0] == [2, 2, 2]


def test_a_single_frame_fills_its_group(tmp_path, write_video):
    path = write_video(tmp_path / "v.mp4", frames=1)
    groups, _ = map_frames(path, FrameSampling(2.0, 768, 2), lambda group: group)
    assert len(groups) == 1 and groups[0][0] == groups[0][1]


@pytest.mark.parametrize("ending", ["mp4", "mkv", "avi"])
@pytest.mark.parametrize("frames, expected", [(1, 2), (3, 2), (12, 6), (40, 20)])
def test_what_is_taken_is_known_from_the_header(tmp_path, write_video, monkeypatch, ending, frames, expected):
    path, taking = write_video(tmp_path / f"v.{ending}", frames=frames, size=(112, 56)), FrameSampling(2.0, 768, 2)
    counts, pace = map_frames(path, taking, len)
    assert sum(counts) == expected
    if ending != "mkv":  # which does not say how many frames it holds
        monkeypatch.setattr(video, "_count", None)
    assert read_extent(path, taking) == VideoExtent(expected, 112, 56, pace)


def test_the_header_of_a_turned_video_has_its_sides_exchanged(tmp_path):
    path = tmp_path / "v.mp4"
    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=4)
        stream.width, stream.height, stream.pix_fmt = 112, 56, "yuv420p"
        stream.set_display_rotation(90)
        for _ in range(4):
            container.mux(stream.encode(av.VideoFrame(112, 56, "yuv420p")))
        container.mux(stream.encode())
    sizes, pace = map_frames(path, FrameSampling(2.0, 768, 2), lambda group: group[0].size)
    assert sizes == [(56, 112)] * 2
    assert read_extent(path, FrameSampling(2.0, 768, 2)) == VideoExtent(4, 112, 56, pace)


def test_a_size_that_the_header_lacks_is_the_first_frames():
    stream = SimpleNamespace(width=0, height=0)
    frames = [SimpleNamespace(width=4, height=2)]
    assert _frame_size(SimpleNamespace(decode=lambda _: iter(frames)), stream, Blob("v", b"x")) == (4, 2)
    with pytest.raises(DataError, match="video v has no frames"):
        _frame_size(SimpleNamespace(decode=lambda _: iter([])), stream, Blob("v", b"x"))


@pytest.mark.parametrize("content", [b"", b"not a video" * 100])
def test_the_header_of_no_video(content):
    errors = []
    for read in (lambda: map_frames(Blob("v", content), FrameSampling(2.0, 768, 2), len),
                 lambda: read_extent(Blob("v", content), FrameSampling(2.0, 768, 2))):  # fmt: skip
        with pytest.raises(DataError, match="^video v ") as raised:
            read()
        errors.append(str(raised.value))
    assert errors[0] == errors[1]


def test_frames_are_turned_upright():
    picture = Image.new("RGB", (4, 2))
    frame = SimpleNamespace(width=4, height=2, to_image=lambda: picture, rotation=90, side_data={})
    container = SimpleNamespace(decode=lambda _: [frame])
    (upright,) = read_in_order(container, None, np.array([0]), Blob("v", b"x"), 1)
    assert upright.size == (2, 4)


@pytest.mark.parametrize(
    "matrix, corner",
    [
        ((1, 0, 0, 1), (0, 0)),
        ((-1, 0, 0, 1), (-1, 0)),  # a front camera: left and right
        ((1, 0, 0, -1), (0, -1)),
        ((0, 1, -1, 0), (-1, 0)),
        ((0, 1, 1, 0), (0, 0)),  # mirrored at the diagonal
        ((0, -1, -1, 0), (-1, -1)),
    ],
)
def test_a_frame_is_shown_by_the_whole_display_matrix(tmp_path, matrix, corner):
    """Red in the upper left corner of what is stored: where it is shown (right and below count from the end)."""
    pixels = np.zeros((56, 112, 3), dtype=np.uint8)
    pixels[:20, :20] = (255, 0, 0)
    path = tmp_path / "v.mp4"
    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=4)
        stream.width, stream.height, stream.pix_fmt = 112, 56, "yuv420p"
        for _ in range(4):
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(stream.encode())
    data, one = bytearray(path.read_bytes()), 1 << 16
    begin = data.find(b"tkhd") + 44  # version 0 of the box: its matrix
    a, b, c, d = (one * number for number in matrix)
    x, y = (one * 112 if min(a, c) < 0 else 0), (one * 112 if min(b, d) < 0 else 0)
    data[begin : begin + 36] = struct.pack(">9i", a, b, 0, c, d, 0, x, y, 1 << 30)
    path.write_bytes(data)
    (shown, *_), _ = map_frames(path, FrameSampling(2.0, 768, 2), lambda group: np.asarray(group[0]).astype(int))
    row, column = (8 if corner[1] == 0 else -8), (8 if corner[0] == 0 else -8)
    red, green, _ = shown[row, column]
    assert red > 150 > 100 > green
    assert (shown[..., 0] > 150).sum() < 1000


def test_a_video_whose_frames_change_their_size_is_named():
    """Their patches would not be those of one grid."""
    frames = [
        SimpleNamespace(width=w, height=2, rotation=0, side_data={}, to_image=lambda w=w: Image.new("RGB", (w, 2)))
        for w in (4, 4, 6)
    ]
    container = SimpleNamespace(decode=lambda _: frames)
    assert len(list(read_in_order(container, None, np.array([0, 1]), Blob("v", b"x"), 3))) == 2
    with pytest.raises(DataError, match="video v changes the size of its frames from 4 × 2 to 6 × 2 at frame 3"):
        list(read_in_order(container, None, np.array([0, 2]), Blob("v", b"x"), 3))


def test_a_video_that_ends_early_is_named(tmp_path):
    container = SimpleNamespace(decode=lambda _: [])
    with pytest.raises(DataError, match="cut off: it ends after 0 of 8 frames"):
        list(read_in_order(container, None, np.array([0, 4]), Blob("v", b"x"), 8))


def clip(path, text="What?") -> Record:
    turns = (Turn("user", (Video(path), text)), Turn("assistant", ("A circle.",)))
    return Record("set", 1, "here", turns)


def test_a_video_becomes_steps_of_two_frames(tmp_path, write_video, preprocessor, tokenizer):
    path = write_video(tmp_path / "v.mp4", frames=12, rate=4, size=(112, 56))
    sample = preprocessor()(clip(path))
    assert sample.grids == ((3, 4, 8),) and sample.pixels[0].shape == (3 * 32, 1176)
    assert sample.seconds == sample.video_seconds == (pytest.approx(1.0),)
    is_video = sample.input_ids == tokenizer.convert_tokens_to_ids("<|video_pad|>")
    assert np.array_equal(sample.mm_token_type_ids, 2 * is_video) and is_video.sum() == 3 * 32 // 4


def test_each_patch_holds_both_frames(tmp_path, write_video, preprocessor):
    """A step in time equals both of its frames as still images, the first in the first half of each channel."""
    path = write_video(tmp_path / "v.mp4", frames=12, rate=4)
    frames, _ = map_frames(path, FrameSampling(2.0, 768, 1), lambda group: group[0])
    make = preprocessor()
    moving = make(clip(path)).pixels[0].reshape(3, 16, 3, 2, 196)  # [time, patches, channels, frames, values]
    for number, frame in enumerate(frames):
        frame.save(tmp_path / "frame.png")
        still = make(Record("set", 1, "here", (Turn("user", (tmp_path / "frame.png", "?")), Turn("assistant", ("A",)))))
        step, half = divmod(number, 2)
        assert np.array_equal(moving[step, :, :, half], still.pixels[0].reshape(16, 3, 2, 196)[:, :, half])


def test_pictures_and_videos_keep_their_order(tmp_path, images, write_video, preprocessor):
    path = write_video(tmp_path / "v.mp4", frames=12, rate=4)  # no two pictures have as many tokens
    parts = (images / "a.png", Video(path), images / "b.jpg")
    record = Record("set", 1, "here", (Turn("user", parts), Turn("assistant", ("A circle.",))))
    sample = preprocessor()(record)
    assert sample.grids == ((1, 4, 4), (3, 4, 4), (1, 4, 8))
    assert [seconds is None for seconds in sample.seconds] == [True, False, True]
    kinds = sample.mm_token_type_ids
    assert [int(k) for k in kinds[kinds > 0]] == [1] * 4 + [2] * 12 + [1] * 8
    starts = np.flatnonzero(np.diff(kinds) > 0)
    assert len(starts) == 3  # each of them in one run


@pytest.mark.parametrize("fps", [0.5, 2.0])
@pytest.mark.parametrize("rate", [4.0, 25.0, 30.0])
@pytest.mark.parametrize("total", [2, 5, 48, 301])
@pytest.mark.parametrize("most", [8, 768])
def test_transformers_own_video_processor_takes_the_same_frames(total, rate, fps, most):
    """Now and then its float32 arithmetic takes a frame more, or the one beside it; not in these cases."""
    pytest.importorskip("torchvision")
    from transformers import Qwen2VLVideoProcessor
    from transformers.video_utils import VideoMetadata

    about = VideoMetadata(total_num_frames=total, fps=rate, duration=total / rate)
    theirs = Qwen2VLVideoProcessor().sample_frames(about, fps=fps, max_frames=most)
    assert FrameSampling(fps, most, 2).indices(total, rate).tolist() == theirs.tolist()


def test_transformers_own_video_processor_gives_the_same(tmp_path, write_video, preprocessor):
    """Up to the resizing, which is torchvision's there and Pillow's here: so at a size that needs none."""
    pytest.importorskip("torchvision")
    from transformers import Qwen2VLVideoProcessor
    from transformers.video_utils import VideoMetadata

    path = write_video(tmp_path / "v.mp4", frames=12, rate=4, size=(112, 56))
    every, _ = map_frames(path, FrameSampling(1e9, 768, 1), lambda group: np.asarray(group[0]))
    processor = Qwen2VLVideoProcessor(size={"shortest_edge": 56 * 56, "longest_edge": 168 * 168})
    about = VideoMetadata(total_num_frames=12, fps=4.0, duration=3.0)
    theirs = processor(
        [np.stack(every)], video_metadata=[about], do_sample_frames=True, fps=2.0, cap_pixels_per_frame=False,
        return_metadata=True, return_tensors="np",
    )  # fmt: skip
    ours = preprocessor()(clip(path))
    assert ours.seconds == (pytest.approx(2 / theirs["video_metadata"][0].sampled_fps),)
    assert theirs["video_grid_thw"].tolist() == [list(ours.grids[0])]
    assert np.allclose(theirs["pixel_values_videos"], ours.pixels[0], atol=1e-5)


CODECS = [("mp4", "libx264"), ("mkv", "libx264"), ("avi", "mpeg4"), ("webm", "libvpx-vp9")]  # with frames out of order


def write_noise(path, codec):
    """60 frames, 25 a second, decodable from every tenth on."""
    rng = np.random.default_rng(0)
    with av.open(str(path), "w") as container:
        stream = container.add_stream(codec, rate=25, options={"g": "10", "cpu-used": "8", "deadline": "realtime"})
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        for _ in range(60):
            picture = np.kron(rng.integers(0, 255, (3, 4, 3), dtype=np.uint8), np.ones((16, 16, 1), dtype=np.uint8))
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        container.mux(stream.encode())
    return path


@pytest.mark.parametrize(("name", "shift"), [("v.mp4", 0), ("v.mp4", 700), ("v.mkv", 0)])
def test_the_times_of_uneven_frames_are_read(tmp_path, name, shift):
    seconds = (0.0, 0.1, 0.2, 0.3, 0.4, 5.0, 9.0)
    with av.open(str(tmp_path / name), "w") as container:
        stream = container.add_stream("mpeg4", rate=10)
        stream.width, stream.height, stream.pix_fmt = 56, 56, "yuv420p"
        stream.time_base = stream.codec_context.time_base = Fraction(1, 1000)
        for second in seconds:
            frame = av.VideoFrame.from_ndarray(np.full((56, 56, 3), int(25 * second), np.uint8), format="rgb24")
            frame.pts, frame.time_base = round(1000 * second) + shift, Fraction(1, 1000)
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    assert read_length(tmp_path / name).times == pytest.approx(seconds)
    taking = FrameSampling(2.0, 768, 1, both_ends=True, start=4.5, end=6.0)
    shades, pace = map_frames(tmp_path / name, taking, lambda group: int(np.asarray(group[0]).mean()))
    assert shades == pytest.approx([125], abs=5) and pace.times == (5.0,)
    assert read_extent(tmp_path / name, taking) == VideoExtent(1, 56, 56, pace)


def test_the_packets_of_steady_frames_are_not_read(tmp_path, write_video, monkeypatch):
    monkeypatch.setattr(video_parts, "_find_index", None)
    assert read_length(write_video(tmp_path / "v.mp4", frames=12)) == VideoLength(12, 4.0)


@pytest.mark.parametrize("ending", ["mkv", "avi"])
def test_steady_frames_have_no_times_of_their_own(tmp_path, write_video, ending):
    assert read_length(write_video(tmp_path / f"v.{ending}", frames=90, rate=30)).times is None


def without_beginning(path, copy, frames):
    """The same packets, of which the first ones are not shown: what cutting without encoding again leaves in MP4."""
    with av.open(str(path)) as given, av.open(str(copy), "w") as written:
        source = given.streams.video[0]
        stream = written.add_stream_from_template(source)
        shift = int(frames / source.average_rate / source.time_base)
        for packet in given.demux(source):
            if packet.size:
                packet.pts, packet.dts, packet.stream = packet.pts - shift, packet.dts - shift, stream
                written.mux(packet)
    return copy


@pytest.mark.parametrize("hidden", [5, 13])
def test_frames_that_are_not_shown_do_not_count(tmp_path, hidden):
    path = write_noise(tmp_path / "v.mp4", "libx264")
    cut = without_beginning(path, tmp_path / "cut.mp4", hidden)
    first = lambda group: np.asarray(group[0])
    every, taking = map_frames(path, FrameSampling(1e9, 768, 1), first)[0], FrameSampling(1e9, 768, 1)
    assert read_length(cut).total == read_extent(cut, taking).frames == 60 - hidden
    shown = map_frames(cut, taking, first)[0]
    assert len(shown) == 60 - hidden and all(map(np.array_equal, shown, every[hidden:]))
    assert_groups_are_those_of_the_whole(cut)
    with video.opened_video(cut) as (container, stream):
        assert video_parts._find_index(container, stream, 60 - hidden) is not None


@pytest.mark.parametrize(("ending", "codec"), CODECS)
def test_some_groups_are_those_of_the_whole_video(tmp_path, ending, codec):
    assert_groups_are_those_of_the_whole(write_noise(tmp_path / f"v.{ending}", codec))


def assert_groups_are_those_of_the_whole(path):
    as_arrays = lambda group: np.stack([np.asarray(image) for image in group])
    length = read_length(path)
    for taking in (FrameSampling(25.0, 768, 2), FrameSampling(6.0, 768, 2), FrameSampling(11.0, 25, 4, both_ends=True)):
        whole, _ = map_frames(path, taking, as_arrays, length)
        last = len(whole) - 1
        for wanted in (range(last + 1), range(last // 2, last), (0, last), (last // 3,), range(1, last, 3)):
            found = list(map(as_arrays, read_groups(path, taking, length, list(wanted))))
            assert len(found) == len(wanted)
            assert all(np.array_equal(group, whole[number]) for group, number in zip(found, wanted, strict=True))


@pytest.mark.parametrize(("ending", "codec"), CODECS)
def test_few_frames_of_a_video_are_those_that_decoding_all_gives(tmp_path, monkeypatch, ending, codec):
    path, taking = write_noise(tmp_path / f"v.{ending}", codec), FrameSampling(3.0, 768, 2)
    as_arrays = lambda group: np.stack([np.asarray(image) for image in group])
    whole, pace = map_frames(path, taking, as_arrays)
    monkeypatch.setattr(video, "SPARSE", 1)
    found, again = map_frames(path, taking, as_arrays)
    assert pace == again and np.array_equal(found, whole)


def write_refreshed(path):
    """1,800 frames of which the first alone is a key frame: columns are refreshed in turn (x264's intra refresh), and
    packets at which a round is over are called keys."""
    rng = np.random.default_rng(0)
    options = {"preset": "veryfast", "x264-params": "intra-refresh=1:keyint=60:bframes=0"}
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=25, options=options)
        stream.width, stream.height, stream.pix_fmt = 128, 128, "yuv420p"
        pixels = np.kron(rng.integers(0, 255, (16, 16, 3), dtype=np.uint8), np.ones((8, 8, 1), dtype=np.uint8))
        for number in range(1800):
            frame = av.VideoFrame.from_ndarray(np.roll(pixels, number, axis=1), format="rgb24")
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return path


@pytest.mark.parametrize("ending", ["mp4", "ts"])
def test_frames_behind_what_is_no_key_frame_are_decoded_from_the_beginning(tmp_path, monkeypatch, ending):
    path, taking = write_refreshed(tmp_path / f"v.{ending}"), FrameSampling(1.0, 14, 2)
    as_arrays = lambda group: np.stack([np.asarray(image) for image in group])
    found, _ = map_frames(path, taking, as_arrays)
    monkeypatch.setattr(video, "SPARSE", 10**6)
    assert np.array_equal(found, map_frames(path, taking, as_arrays)[0])


@pytest.mark.parametrize("bframes", ["0", "2"])
def test_keys_of_a_transport_stream_are_found(tmp_path, monkeypatch, bframes):
    """Which is sought by when packets are decoded."""
    rng, path, taking = np.random.default_rng(0), tmp_path / "v.ts", FrameSampling(0.1, 4, 2)
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=25, options={"g": "25", "bf": bframes, "preset": "veryfast"})
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        for _ in range(600):
            picture = np.kron(rng.integers(0, 255, (3, 4, 3), dtype=np.uint8), np.ones((16, 16, 1), dtype=np.uint8))
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        container.mux(stream.encode())
    as_arrays = lambda group: np.stack([np.asarray(image) for image in group])
    with monkeypatch.context() as patched:
        patched.setattr(video, "SPARSE", 10**6)
        whole, _ = map_frames(path, taking, as_arrays)
    monkeypatch.setattr(video, "read_in_order", lambda *_: pytest.fail("decoded from the beginning"))
    assert np.array_equal(map_frames(path, taking, as_arrays)[0], whole)


def test_few_frames_of_a_long_video_are_not_decoded_with_all_others(tmp_path, write_video, monkeypatch):
    """A key frame each 12 frames at most; four frames are taken."""
    path, taking, seen = write_video(tmp_path / "v.mp4", frames=600), FrameSampling(0.1, 4, 2), list[int]()
    read = video.read_in_order
    monkeypatch.setattr(video, "read_in_order", lambda *given: seen.append(1) or read(*given))
    shades = map_frames(path, taking, lambda group: [int(np.asarray(image).mean()) for image in group])[0]
    assert not seen
    monkeypatch.setattr(video, "SPARSE", 1000)
    assert map_frames(path, taking, lambda group: [int(np.asarray(image).mean()) for image in group])[0] == shades
    assert seen


def test_frames_without_times_are_counted_from_the_beginning(tmp_path, write_video, monkeypatch):
    path, taking = write_video(tmp_path / "v.mp4", frames=40), FrameSampling(4.0, 768, 2)
    wanted = [np.asarray(group[0]) for group in read_groups(path, taking, read_length(path), [7, 15])]
    monkeypatch.setattr(video_parts, "_find_index", lambda *_: None)
    found = [np.asarray(group[0]) for group in read_groups(path, taking, read_length(path), [7, 15])]
    assert np.array_equal(found, wanted) and not np.array_equal(*found)


def test_a_long_video_that_is_cut_off_is_told(tmp_path, write_video):
    path, taking = write_video(tmp_path / "v.avi", frames=40), FrameSampling(4.0, 768, 2)
    length = read_length(path)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(DataError, match=r"v.avi (is cut off|cannot be decoded)"):
        list(read_groups(path, taking, length, [19]))


TAKING = FrameSampling(fps=2.0, max_frames=6, group=2)


def frames(folder, count, rate=2.0):
    """Grey images, the brighter the later."""
    for number in range(count):
        Image.new("RGB", (56, 56), (20 * number,) * 3).save(folder / f"{number}.png")
    return Frames(tuple(folder / f"{number}.png" for number in range(count)), rate)


def levels(images):
    return [image.getpixel((0, 0))[0] // 20 for image in images]


@pytest.mark.parametrize("both_ends", [False, True])
@pytest.mark.parametrize(
    ("count", "shown"),
    [(1, [[0, 0]]), (2, [[0, 1]]), (3, [[0, 1], [2, 2]]), (5, [[0, 1], [2, 3], [4, 4]]), (6, [[0, 1], [2, 3], [4, 5]])],
)
def test_all_frames_are_shown_and_the_last_fills_the_group(tmp_path, count, shown, both_ends):
    taking = replace(TAKING, both_ends=both_ends)
    found, pace = map_images(frames(tmp_path, count), taking, levels)
    extent = extent_of_images(frames(tmp_path, count), taking)
    assert found == shown and (extent.frames, extent.width, extent.height) == (2 * len(shown), 56, 56)
    assert extent.pace == pace and pace.seconds == 1.0 and pace.firsts == tuple(map(float, range(len(shown))))


def test_more_frames_than_are_taken_are_taken_evenly(tmp_path):
    found, pace = map_images(frames(tmp_path, 12, rate=4.0), TAKING, levels)
    assert found == [[0, 2], [4, 6], [8, 10]] and pace.firsts == (0.0, 1.0, 2.0)


def test_frames_of_two_sizes_are_refused_before_and_after(tmp_path):
    listed = frames(tmp_path, 4)
    Image.new("RGB", (28, 56)).save(tmp_path / "3.png")
    for look in (lambda: map_images(listed, TAKING, levels), lambda: extent_of_images(listed, TAKING)):
        with pytest.raises(DataError, match=r"of 56 × 56 and 28 × 56 pixels \(at .*3\.png\)"):
            look()


@pytest.mark.parametrize(
    ("part", "indices", "firsts"),
    [
        ({}, [0, 4, 8, 12, 16, 20], (0.0, 1.0, 2.0)),
        ({"start": 1.0}, [8, 12, 16, 20], (1.0, 2.0)),
        ({"start": 1.01}, [9, 12, 16, 20], (1.125, 2.0)),
        ({"end": 1.0}, [0, 2, 4, 6], (0.0, 0.5)),
        ({"start": 0.5, "end": 1.5}, [4, 6, 8, 10], (0.5, 1.0)),
        ({"start": 2.8, "end": 9.0}, [23], (2.875,)),
    ],
)
def test_a_part_of_a_video_is_taken_as_a_video_of_its_length(part, indices, firsts):
    """24 frames, 8 a second."""
    taking = replace(TAKING, **part)
    assert taking.indices(24, 8.0).tolist() == indices and taking.pace(24, 8.0).firsts == firsts


def test_seconds_that_are_a_frame_but_for_rounding_are_that_frame():
    assert 2.2 * 25.0 > 55 and 1.16 * 25.0 < 29
    taking = replace(TAKING, fps=25.0, max_frames=100, both_ends=True)
    assert replace(taking, start=2.2).indices(100, 25.0)[0] == 55
    assert replace(taking, end=1.16).indices(100, 25.0)[-1] == 29


@pytest.mark.parametrize("part", [{"start": 3.0}, {"start": 5.0, "end": 6.0}, {"start": 0.01, "end": 0.02}])
def test_a_part_without_a_frame_is_refused(part):
    with pytest.raises(DataError, match="no frame of the video, which is 3.00 s long, is between"):
        replace(TAKING, **part).indices(24, 8.0)


BOTH_ENDS = FrameSampling(2.0, 768, 2, both_ends=True)
UNEVEN = (*(number / 10 for number in range(20)), 12.0, 22.0)  # 20 frames in two seconds, and two later


@pytest.mark.parametrize(
    ("part", "indices", "middles"),
    [
        ({}, [0, 5, 10, 15, 19, 20, 21], (0.25, 1.25, 6.95, 22.0)),
        ({"start": 11.0, "end": 13.0}, [20], (12.0,)),
        ({"start": 13.0, "end": 14.0}, [20], (12.0,)),  # which is shown until the last one begins
        ({"end": 1.9}, [0, 6, 13, 19], (0.3, 1.6)),
        ({"start": 1.9}, [19, 20, 21], (6.95, 22.0)),
        ({"max_frames": 2}, [0, 21], (11.0,)),
    ],
)
def test_frames_that_are_uneven_are_taken_and_told_by_their_times(part, indices, middles):
    taking, length = replace(BOTH_ENDS, **part), (22, 22 / 22.5, UNEVEN)
    assert taking.indices(*length).tolist() == indices
    assert taking.pace(*length).times == pytest.approx(middles)
    every = replace(taking, group=1).pace(*length)
    assert every.firsts == tuple(UNEVEN[index] for index in indices)


def test_seconds_between_steps_are_those_of_uneven_frames():
    assert BOTH_ENDS.pace(22, 1.0, UNEVEN).seconds == pytest.approx(2 * 22.0 * 22 / 21 / 7)
    with pytest.raises(DataError, match="no frame of the video"):
        replace(BOTH_ENDS, start=24.0).indices(22, 1.0, UNEVEN)


def record(part):
    return Record("set", 1, "here", (Turn("user", (part, "What?")), Turn("assistant", ("A.",))))


@pytest.fixture
def parts(tmp_path, write_video):
    video, picture = write_video(tmp_path / "v.mp4", frames=24, rate=8, size=(112, 112)), tmp_path / "p.png"
    Image.effect_noise((168, 168), 50).convert("RGB").save(picture)
    settings = {
        "max_pixels": Settings(max_pixels=56 * 56), "fps": Settings(fps=4.0), "frames": Settings(frames=6),
        "part": Settings(start=0.5, end=1.5, fps=8.0), "min_pixels": Settings(min_pixels=140 * 140),
    }  # fmt: skip
    shown = {f"video, {name}": Video(video, one) for name, one in settings.items()}
    shown |= {f"image, {name}": SizedImage(picture, settings[name]) for name in ("max_pixels", "min_pixels")}
    return shown | {
        "frames": Video(frames(tmp_path, 5)),
        "frames, part": Video(frames(tmp_path, 6), Settings(start=1.0)),
    }


def test_a_sample_is_as_long_as_measured(parts, preprocessor):
    preprocess, found = preprocessor(), {}
    for name, part in parts.items():
        sample, length = preprocess(record(part)), preprocess.measure(record(part))
        assert (length.text, length.vision) == (len(sample.input_ids), int((sample.mm_token_type_ids > 0).sum())), name
        assert length.encoded_bytes == sum(file.stat().st_size for file in files_of(part)), name
        found[name] = sample.grids[0]
    assert found == {
        "video, max_pixels": (3, 4, 4), "video, fps": (6, 8, 8), "video, frames": (3, 8, 8), "video, part": (4, 8, 8),
        "video, min_pixels": (3, 10, 10), "image, max_pixels": (1, 4, 4), "image, min_pixels": (1, 12, 12),
        "frames": (3, 4, 4), "frames, part": (2, 4, 4),
    }  # fmt: skip


def test_parts_of_a_long_video_have_the_settings_of_the_whole(parts, preprocessor):
    whole, apart = preprocessor(), preprocessor(video_whole_frames=2)
    for name, part in parts.items():
        left = apart(record(part))
        assert isinstance(left.pixels[0], LongVideo) == name.startswith("video"), name
        (read,), (expected,) = apart.pictures.complete(left).pixels, whole(record(part)).pixels
        assert np.array_equal(read, expected) and left.grids == whole(record(part)).grids, name
