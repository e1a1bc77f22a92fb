"""What a rank has staged is written as it was then, whatever the rank does meanwhile."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

from dhp.checkpoint.shard_reader import read_shards
from dhp.checkpoint.shard_writer import BackgroundWriter, ShardWriter, run_write
from dhp.core.axes import Degrees
from dhp.core.errors import CheckpointError
from dhp.core.reports import SavedShare
from tests.checkpoint.test_round_trip import STEPS, assert_same_tensors
from tests.helpers.layouts import Case, Running, make_reader
from tests.helpers.rows import slow_but


def test_copies_are_of_the_moment_and_their_memory_is_kept(tmp_path: Path) -> None:
    writer, weight, gate = BackgroundWriter(), torch.arange(4.0), threading.Event()
    memory: list[dict[str, int]] = []
    assert writer.take(wait=True) is None
    for number in range(2):
        weight.fill_(number)
        shards = ShardWriter(tmp_path / str(number) / "text", 0, keep=writer.keep)
        shards.add("weight", weight)
        shards.add_flat("many", weight[:2], 0, (4,))
        shards.add_flat("many", weight[2:] + 1, 2, (4,))  # of one tensor two pieces
        gate.clear()
        writer.begin(lambda shards=shards: (gate.wait(), shards.write())[1])
        assert writer.take(wait=False) == SavedShare(done=False)
        weight.fill_(7)
        with pytest.raises(RuntimeError, match="is being written already"):
            writer.begin(tuple)
        gate.set()
        saved = writer.take(wait=True)
        assert (
            saved is not None and saved.done and [file.name for file in saved.files][:1] == ["rank_00000.safetensors"]
        )
        assert writer.take(wait=False) == saved
        found = read_shards(tmp_path / str(number) / "text")
        assert found["weight"].tolist() == [number] * 4 and found["many"].tolist() == [number] * 2 + [number + 1] * 2
        memory.append({key: buffer.data_ptr() for key, buffer in writer._buffers.items()})
    assert memory[0] == memory[1]
    assert writer.nbytes == 2 * 16
    writer.keep("other", weight)
    writer.begin(tuple)
    assert writer.nbytes == 16  # what was not kept again is gone


def test_what_cannot_be_written_is_an_answer_not_an_end(tmp_path: Path) -> None:
    def refuse() -> tuple[()]:
        raise CheckpointError("the disk is full")

    writer = BackgroundWriter()
    writer.begin(refuse)
    assert writer.take(wait=True) == SavedShare(done=True, error="the disk is full") == run_write(refuse)
    writer.begin(lambda: 1 // 0)  # type: ignore[arg-type, return-value]
    with pytest.raises(ZeroDivisionError):  # a mistake of ours is no full disk
        writer.take(wait=True)


CASES = [
    Case(Degrees(ulysses=2), Degrees(tensor=2), dtype="bfloat16", zero_stage=1),
    Case(Degrees(data=2), Degrees(data=2), 2, "float32", 3, text_zero_stage=3),
    Case(Degrees(data=2, tensor=2), Degrees(data=2, tensor=2), 2, "bfloat16", 2, text_zero_stage=3, fsdp=True),
]


@pytest.mark.parametrize("case", slow_but(CASES, CASES[0]), ids=str)
def test_ranks_that_train_on_write_what_they_had(case: Case, made_model: str, tmp_path: Path) -> None:
    feed = make_reader(made_model, case, STEPS)
    with Running(made_model, case) as running:
        for number in range(2):  # the second time into the first one's memory
            running.step(feed.step(number))
            running.save(tmp_path / f"at {number}")
            assert running.await_saved() == running.await_saved()
            running.save(tmp_path / f"behind {number}", background=True)
            running.step(feed.step(2))
            files = {file.name: file.nbytes for share in running.await_saved() for file in share.files}
            running.save(tmp_path / f"later {number}")
            later = {file.name: file for share in running.await_saved() for file in share.files}
            assert later.keys() == files.keys()
    for number in range(2):
        for kind in ("vision", "text", "vision/optimizer", "text/optimizer"):
            assert_same_tensors(tmp_path / f"behind {number}" / kind, tmp_path / f"at {number}" / kind)
