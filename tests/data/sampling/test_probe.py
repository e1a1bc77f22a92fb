"""What a look at some samples says: keys that nothing reads, and, where a bad sample ends the run, what is wrong."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from dhp.config.data import DatasetEntry
from dhp.core.errors import DataError
from dhp.data.read.annotations import read_annotations
from dhp.data.sampling import probe

GOOD = {"query": "What?", "response": "A.", "id": 7}
BAD = {"query": "", "response": "A."}


@pytest.fixture
def look(write_json, monkeypatch):
    monkeypatch.setattr(probe, "PROBED_SAMPLES", 4)

    def look(samples, **more):
        return probe.check_some_samples(["set%50"], {"set": DatasetEntry(str(write_json(samples)))}, 0, False, **more)

    return look


def test_keys_that_are_not_read_are_named_and_counted(look):
    told = look([GOOD | {"topic": "a", "score": 0}, GOOD | {"topic": "b"}] * 4)
    assert told[0].startswith("set: keys that are not read, of 4 samples: topic (4), score (")
    assert look([GOOD, GOOD | {"topic": None}] * 4) == []


def test_a_defect_ends_the_run_or_is_passed_over(look):
    with pytest.raises(DataError, match="the question is empty"):
        look([BAD] * 8)
    assert look([BAD | {"topic": "a"}] * 8, skips=True) == []


def test_a_video_for_a_model_that_sees_none_is_found_before_anything_starts(write_json, tmp_path):
    (tmp_path / "clip.mp4").write_bytes(b"0")
    video = {"query": "<video>What?", "response": "A.", "videos": ["clip.mp4"]}
    entry = {"set": DatasetEntry(str(write_json([video] * 4)), str(tmp_path))}
    look = lambda **more: probe.check_some_samples(["set"], entry, 0, False, **more)
    assert look() == []
    with pytest.raises(DataError, match="a video, but this model sees images only.*on_bad_sample=skip"):
        look(videos_allowed=False)
    assert look(videos_allowed=False, skips=True) == []


@pytest.mark.parametrize(("largest", "dim"), [(4095, True), (40_000, False)])
def test_grey_pictures_of_few_bits_are_named(write_json, tmp_path, largest, dim):
    Image.fromarray(np.array([[0, largest]], dtype=np.uint16)).save(tmp_path / "a.png")
    shown = {"query": "<image>What?", "response": "A.", "images": ["a.png"]}
    entry = {"set": DatasetEntry(str(write_json([shown] * 4)), str(tmp_path))}
    found = probe.check_some_samples(["set"], entry, 0, False)
    assert [("4 of 4" in line and "nearly black" in line) for line in found] == [True] * dim


def test_inspect_data_counts_over_all_samples(write_json):
    samples = [GOOD | {"topic": "a"}] * 3 + [BAD] + [GOOD | {"source": "b"}]
    annotations = read_annotations("set", write_json(samples), None)
    assert probe.count_unread(annotations) == ["set: keys that are not read, of 5 samples: topic (3), source (1)"]
    assert probe.count_unread(read_annotations("set", write_json([GOOD]), None)) == []


def test_a_turns_and_a_parts_keys_are_named_as_such(write_json):
    part = {"type": "text", "text": "What?", "cache_control": {"type": "ephemeral"}}
    turns = [{"role": "user", "content": [part], "name": "Ann"}, {"role": "assistant", "content": "A."}]
    told = probe.count_unread(read_annotations("set", write_json([{"messages": turns}]), None))
    assert told == ["set: keys that are not read, of 1 samples: turn.name (1), part.cache_control (1)"]


def test_answers_that_end_in_the_templates_end_are_counted(look):
    told = look([GOOD | {"response": "A.<|im_end|> "}] * 8, end="<|im_end|>")
    assert [line.partition(" answers")[0] for line in told] == ["warning: set: 4 of 4"]
    assert look([GOOD | {"response": "A.\n"}] * 8, end="\n") == []
