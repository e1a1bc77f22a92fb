"""Lengths of a dataset: told for any sample of any epoch, measured in chunks or when they are needed, kept on disk."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import experiments.baselines  # noqa: F401  it registers length_group
from dhp.config.data import DatasetEntry
from dhp.core.errors import DataError
from dhp.data.sample.lengths import LENGTH_COLUMNS
from dhp.data.sampling import length_table
from dhp.data.sampling.balanced_sampler import BalancedSampler
from dhp.data.sampling.dataset import Dataset, open_dataset
from dhp.data.sampling.length_cache import LengthCache
from dhp.data.sampling.length_table import MeasuredDataset, RowChunk
from dhp.data.sampling.sampler import BalanceSettings, BatchLayout

NONE = np.arange(0)


def learn(table: MeasuredDataset, indices: np.ndarray = NONE) -> None:
    for chunk in table.missing(indices):
        table.learn(chunk, table.measure(chunk))


def sample(text: str, **more) -> dict:
    return {"conversations": [{"from": "human", "value": text}, {"from": "gpt", "value": "Yes."}], **more}


@pytest.fixture
def dataset(write_json, images) -> Dataset:
    """Of `pictures` two of four samples, of `words` each once and a half; some are defective."""
    asked = [("<image>0", "a.png"), ("<image>1", "gone.png"), ("2", "b.jpg"), ("<image>3", "b.jpg")]
    first = write_json([sample(text, image=name) for text, name in asked])
    second = write_json([sample("some " + "more " * n) for n in range(5)] + [{"conversations": []}], "text.jsonl")
    registry = {
        "pictures": DatasetEntry(str(first), str(images)),
        "words": DatasetEntry(str(second), weight=1.5),
    }
    return open_dataset(["pictures%50", "words", "pictures"], registry, seed=3)


@pytest.fixture
def make(dataset: Dataset, preprocessor, tmp_path: Path):
    return lambda **more: MeasuredDataset(dataset, preprocessor(), LengthCache(tmp_path / "cache"), **more)


def expected(dataset: Dataset, preprocess, epoch: int) -> list[tuple[int, ...] | None]:
    """By the real thing: image tokens, tokens, patches and targets."""
    found = []
    for index in range(len(dataset)):
        try:
            made = preprocess(dataset.record(index, epoch))
            vision = int((made.mm_token_type_ids > 0).sum())
            found.append((vision, len(made.input_ids), made.patches, made.target_tokens))
        except Exception:
            found.append(None)
    return found


@pytest.mark.parametrize("epoch", [0, 1])
def test_an_epoch_is_divided_by_dataset(make, epoch: int) -> None:
    """Of pictures there are two and four, of six words nine."""
    measured = make()
    found, whole = measured.of_epoch(epoch), measured.columns(np.arange(len(measured)), epoch)
    assert {name: len(columns) for name, columns in found.items()} == {"pictures": 6, "words": 9}
    assert np.sort(np.concatenate(list(found.values()))).tolist() == np.sort(whole).tolist()


def test_lengths_of_each_epoch_equal_the_samples_own(make, dataset: Dataset, preprocessor) -> None:
    table = make(whole=False)
    for epoch in (0, 1, 2):
        loads = table.loads(np.arange(len(dataset)), epoch)
        wanted = expected(dataset, preprocessor(), epoch)
        wanted_loads = [(own or (0, 0))[:2] for own in wanted]
        assert list(zip(loads.vision.tolist(), loads.text.tolist())) == wanted_loads
        assert loads.vision.dtype == loads.text.dtype == np.int64
        columns = table.columns(np.arange(len(dataset)), epoch)[["vision", "text", "patches", "targets"]]
        assert columns.tolist() == [own or (0, 0, 0, 0) for own in wanted]
        bad = np.array([index for index, own in enumerate(wanted) if own is None])
        told = table.defects(bad, epoch)
        assert all("dataset 'pictures', element" in text or "dataset 'words', line 6" in text for text in told)


def test_chunks_are_learned_in_any_order_and_kept(make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(length_table, "MEASURED_ROWS", 3)
    table = make()
    chunks = table.missing(NONE)
    told = [("pictures", [0, 1, 2]), ("pictures", [3]), ("words", [0, 1, 2]), ("words", [3, 4, 5])]
    assert [(chunk.dataset, chunk.rows.tolist()) for chunk in chunks] == told
    for chunk in reversed(chunks):
        table.learn(chunk, table.measure(chunk))
    assert table.missing(NONE) == []
    again = make()
    assert [chunk.rows.tolist() for chunk in again.missing(NONE)] == [[1, 2], [5]]  # not their neighbours
    unknown = {
        name: np.flatnonzero(t.columns["text"] == length_table.UNKNOWN).tolist() for name, t in again.tables.items()
    }
    assert unknown == {"pictures": [1, 2], "words": [5]}  # defective: they may have been mended
    indices = np.arange(len(table))
    one, other = table.loads(indices, 1), again.loads(indices, 1)
    assert np.array_equal(one.text, other.text) and np.array_equal(one.vision, other.vision)
    assert one.text.any() and again.tables["pictures"].defects == table.tables["pictures"].defects


def test_what_is_learned_twice_counts_once(make, dataset: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(length_table, "MEASURED_ROWS", 1)
    table = make()
    for chunk in table.missing(NONE)[:1] + table.missing(NONE)[-1:]:
        for _ in range(len(table.tables[chunk.dataset])):  # as often as it has rows
            table.learn(chunk, table.measure(chunk))
    indices = np.arange(len(dataset))
    found, wanted = table.loads(indices, 0), make().loads(indices, 0)
    assert found.text.tolist() == wanted.text.tolist() and found.text.min() == 0


def test_an_image_that_came_later_is_found(make, images: Path) -> None:
    table = make()
    learn(table)
    (images / "gone.png").write_bytes((images / "a.png").read_bytes())
    again = make()
    learn(again)
    assert set(again.tables["pictures"].defects) == {2} and make().tables["pictures"].columns["text"][1] > 0


def test_a_resumed_run_leaves_out_what_it_had_left_out(make, images: Path) -> None:
    """Or its rows would be others."""
    table = make()
    learn(table)
    left_out = table.left_out()
    assert left_out == {"pictures": [1, 2], "words": [5]}
    (images / "gone.png").write_bytes((images / "a.png").read_bytes())
    for measured_before in (False, True):
        again = make()
        if measured_before:
            learn(again)
            assert again.left_out()["pictures"] == [2]
        again.leave_out(left_out)
        learn(again)
        assert again.left_out() == left_out and again.missing(NONE) == []
        assert again.tables["pictures"].columns[1] == np.zeros(1, LENGTH_COLUMNS)[0]
        assert "element 2" in again.tables["pictures"].defects[1]
        assert "was defective when this run began" in again.tables["pictures"].defects[1]


def test_a_run_is_resumed_though_a_sample_was_mended(make, images: Path) -> None:
    """In the same steps; without leaving it out again, it is refused."""

    def sampler(table: MeasuredDataset) -> BalancedSampler:
        return BalancedSampler(table, BalanceSettings("length_group", window=12), BatchLayout(1, 2, 1), 0, "skip")

    whole = make(whole=False)
    stopped = sampler(whole)
    seen = [next(stopped).samples for _ in range(3)]
    state, left_out = stopped.state_dict(), whole.left_out()
    following = next(stopped).samples
    assert left_out["pictures"]
    (images / "gone.png").write_bytes((images / "a.png").read_bytes())
    with pytest.raises(DataError, match="checksum of the lengths"):
        sampler(make(whole=False)).load_state_dict(state)
    again = make(whole=False)
    again.leave_out(left_out)
    resumed = sampler(again)
    resumed.load_state_dict(state)
    assert next(resumed).samples == following and following not in seen


def test_two_runs_do_not_take_from_each_other_what_they_measured(make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(length_table, "SAVE_S", -1.0)
    one, other = make(whole=False), make(whole=False)
    one.loads(np.array([11]), 0)
    other.loads(np.array([14]), 0)
    assert sum((t.columns["text"] > 0).sum() for t in other.tables.values()) == 2  # it took the first one's too
    assert sum((t.columns["text"] > 0).sum() for t in make().tables.values()) == 2


def test_windows_are_measured_as_far_as_the_run_needs(make) -> None:
    table = make(whole=False)
    assert table.missing(NONE) == []
    rows = {chunk.dataset: chunk.rows.tolist() for chunk in table.missing(np.array([11, 14, 2]))}
    assert rows["pictures"] == [0, 3] and len(rows["words"]) == 1
    learn(table, np.array([11, 14, 2]))
    assert table.missing(np.array([11, 14, 2])) == [] and table.missing(np.array([11, 3]))


def test_a_window_measures_what_it_needs(make) -> None:
    table = make(whole=False)
    table.loads(np.array([0]), 0)
    assert sum((t.columns["text"] != length_table.UNKNOWN).sum() for t in table.tables.values()) == 1


def test_what_was_measured_before_a_stop_is_not_measured_again(make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(length_table, "SAVE_S", -1.0)
    table = make()
    table.loads(np.array([11, 14]), 0)  # rows 0 and 3 of `pictures`
    again = make()
    assert sum((t.columns["text"] != length_table.UNKNOWN).sum() for t in again.tables.values()) == 2
    assert [chunk.dataset for chunk in again.missing(NONE)] == ["pictures", "words"]


def test_decoding_finds_what_headers_do_not_show(make, images: Path) -> None:
    table = make()
    name = images / "b.jpg"
    name.write_bytes(name.read_bytes()[:-20] if len(name.read_bytes()) > 700 else name.read_bytes()[:600])
    chunk = RowChunk("pictures", np.arange(4))
    from_headers = {row for row in table.measure(chunk).defects}
    assert from_headers == {1, 2}
    assert {row for _, row in table.decode(chunk)} == {1, 2, 3}
