"""A damaged checkpoint has an error with the file's name, and `auto` goes back to the newest that is whole."""

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
import torch

from dhp.__main__ import main as dhp
from dhp.checkpoint.folder import (
    Unfinished,
    check_checkpoint,
    file_checksum,
    finish_checkpoint,
    open_checkpoint,
    quarantine,
    read_model_files,
)
from dhp.checkpoint.resume import find_start
from dhp.checkpoint.shard_reader import ShardReader, read_shards
from dhp.checkpoint.shard_writer import ShardWriter
from dhp.core.errors import CheckpointError
from dhp.core.locks import fenced

ABOUT = {"parts": ["vision", "text"], "skipped_samples": 0, "settings": {}, "data": {}}


def write(parent: Path, step: int) -> Path:
    """A checkpoint of two parts; the text part's weight in pieces of two ranks."""
    folder = open_checkpoint(parent, step)
    for part in ("vision", "text"):
        for below in (part, f"{part}/optimizer"):
            for rank in (0, 1):
                writer = ShardWriter(folder / below, rank)
                writer.add_flat("weight", torch.arange(3.0) + 3 * rank, 3 * rank, (2, 3))
                writer.write()
    config = parent / "config.json"
    config.write_text("{}")
    merges = parent / "merges.txt"
    merges.write_text("a b\nc d\n")
    return finish_checkpoint(folder, {"step": step, **ABOUT}, read_model_files([config, merges]))


def rewrite_about(checkpoint: Path, about: dict[str, Any]) -> None:
    """Say something else of a checkpoint, in the first format: without checksums."""
    values = {key: value for key, value in about.items() if key not in ("format", "crc32")}
    values |= {"files": {name: one["bytes"] for name, one in about["files"].items()}} if "files" in about else {}
    (checkpoint / "checkpoint.json").write_text(json.dumps(values))


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-4])


def longer(file: Path) -> None:
    file.write_bytes(file.read_bytes() + b"\n")


def empty(file: Path) -> None:
    file.write_bytes(b"")


def zeros(file: Path) -> None:
    file.write_bytes(bytes(file.stat().st_size))


def other_json(file: Path) -> None:
    file.write_text('{"weight": {"shape": "all"}}')


def a_list(file: Path) -> None:
    file.write_text("[1, 2]")


DAMAGE = [
    ("checkpoint.json", empty),
    ("checkpoint.json", cut),
    ("checkpoint.json", a_list),
    ("vision/rank_00001.json", empty),
    ("vision/rank_00001.json", cut),
    ("text/optimizer/rank_00000.json", other_json),
    ("text/optimizer/rank_00000.json", a_list),
    ("vision/rank_00000.safetensors", empty),
    ("text/rank_00001.safetensors", cut),
    ("text/rank_00001.safetensors", zeros),
    ("model/config.json", empty),
    ("model/merges.txt", cut),
    ("model/merges.txt", longer),
]


@pytest.mark.parametrize(("name", "damage"), DAMAGE)
def test_damage_has_the_name_of_the_file_and_auto_goes_back(
    tmp_path: Path, name: str, damage: Callable[[Path], None]
) -> None:
    for step in (4, 5, 6):
        write(tmp_path, step)
    newest = tmp_path / "step_6"
    check_checkpoint(newest)
    damage(newest / name)
    with pytest.raises(CheckpointError, match=f"{newest / name} is damaged .*Resume from an earlier checkpoint"):
        find_start(str(newest), tmp_path / "own")
    start = find_start("auto", tmp_path)
    assert start.step == 5 and start.checkpoint == tmp_path / "step_5"
    [(skipped, reason)] = start.damaged
    assert skipped == newest and str(newest / name) in reason


def test_what_no_reader_asks_for_is_passed_over(tmp_path: Path) -> None:
    """As the generators' states that runs used to write."""
    checkpoint = write(tmp_path, 1)
    (checkpoint / "text" / "random").mkdir()
    (checkpoint / "text" / "random" / "rank_00000.safetensors").write_bytes(b"no header")
    check_checkpoint(checkpoint)
    assert find_start("auto", tmp_path).checkpoint == checkpoint


@pytest.mark.parametrize("pattern", ["text/rank_00001.*", "text/optimizer/rank_00001.*", "vision/rank_*"])
def test_lost_files_are_noticed(tmp_path: Path, pattern: str) -> None:
    checkpoint = write(tmp_path, 1)
    for file in checkpoint.glob(pattern):
        file.unlink()
    with pytest.raises(CheckpointError, match=f"{checkpoint / pattern.rpartition('/')[0]}"):
        check_checkpoint(checkpoint)


@pytest.mark.parametrize("folder", ["text", "vision/optimizer"])
def test_lost_pieces_are_noticed_though_no_list_has_them(tmp_path: Path, folder: str) -> None:
    checkpoint = write(tmp_path, 1)
    about = json.loads((checkpoint / "checkpoint.json").read_text())
    for file in sorted(checkpoint.glob(f"{folder}/rank_00001.*")):
        del about["files"][str(file.relative_to(checkpoint))]
        file.unlink()
    rewrite_about(checkpoint, about)
    with pytest.raises(CheckpointError, match=f"{checkpoint / folder}: the pieces of weight hold 3 values of 6"):
        check_checkpoint(checkpoint)


def test_a_lost_file_of_which_no_other_speaks_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank's tensors beyond the first file's room are in further ones, and their places beside them."""
    monkeypatch.setattr("dhp.checkpoint.shard_writer.FILE_BYTES", 1)
    folder = open_checkpoint(tmp_path, 1)
    for below in ("text", "text/optimizer"):
        writer = ShardWriter(folder / below, 0)
        for name in ("first", "second"):
            writer.add(name, torch.ones(2))
        assert tuple(file.name for file in writer.write()) == tuple(
            f"rank_00000{n}.{kind}" for n in ("", "_001") for kind in ("safetensors", "json")
        )
    (tmp_path / "config.json").write_text("{}")
    checkpoint = finish_checkpoint(
        folder, {"step": 1, **ABOUT, "parts": ["text"]}, read_model_files([tmp_path / "config.json"])
    )
    check_checkpoint(checkpoint)
    assert set(read_shards(checkpoint / "text")) == {"first", "second"}
    for file in checkpoint.glob("text/rank_00000_001.*"):
        file.unlink()
    with pytest.raises(CheckpointError, match="rank_00000_001.json is missing"):
        check_checkpoint(checkpoint)


@pytest.mark.parametrize("missing", ["step", "parts", "settings", "skipped_samples"])
def test_a_json_of_another_shape(tmp_path: Path, missing: str) -> None:
    about = write(tmp_path, 6) / "checkpoint.json"
    about.write_text(json.dumps({key: value for key, value in {"step": 6, **ABOUT}.items() if key != missing}))
    with pytest.raises(CheckpointError, match=f"{about} is damaged .{missing} should be"):
        find_start(str(about.parent), tmp_path / "own")


def test_nothing_whole_is_said_not_begun_anew(tmp_path: Path) -> None:
    for step in (1, 2):
        empty(write(tmp_path, step) / "checkpoint.json")
    with pytest.raises(CheckpointError, match=r"(?s)finds no checkpoint .*step_2: .*step_1: .*move these away"):
        find_start("auto", tmp_path)


def test_a_damaged_one_makes_room_for_its_step(tmp_path: Path) -> None:
    damaged = write(tmp_path, 6)
    write(tmp_path, 5)
    empty(damaged / "checkpoint.json")
    [line] = find_start("auto", tmp_path).quarantine()
    assert line.startswith("step_6 is skipped, and now named step_6.damaged: ") and "checkpoint.json is damaged" in line
    assert write(tmp_path, 6) == damaged
    assert find_start("auto", tmp_path).step == 6
    quarantine(damaged)  # again: nothing gives way
    assert sorted(path.name for path in tmp_path.glob("step_*")) == ["step_5", "step_6.damaged", "step_6.damaged.2"]


def flipped(content: bytes, place: float) -> bytes:
    """One bit of it is another one."""
    at = min(len(content) - 1, int(len(content) * place))
    return content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]


@pytest.mark.parametrize("place", [0, 0.5, 1])
def test_one_bit_in_any_file_is_noticed(tmp_path: Path, place: float) -> None:
    checkpoint = write(tmp_path, 6)
    files = [file for file in sorted(checkpoint.rglob("*")) if file.is_file()]
    assert len(files) == 19
    for file in files:
        content = file.read_bytes()
        file.write_bytes(flipped(content, place))
        with pytest.raises(CheckpointError, match=f"{file} is damaged"):
            check_checkpoint(checkpoint)
        file.write_bytes(content)
    check_checkpoint(checkpoint)


@pytest.mark.parametrize("damage", [cut, longer])
def test_another_size_is_noticed_without_reading_contents(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    checkpoint = write(tmp_path, 1)
    damage(checkpoint / "model" / "merges.txt")  # of which no header speaks
    with pytest.raises(CheckpointError, match=r"merges\.txt.*it has \d+ bytes of 8"):
        check_checkpoint(checkpoint, contents=False)


def test_any_file_that_is_gone_is_noticed(tmp_path: Path) -> None:
    checkpoint = write(tmp_path, 6)
    for file in [file for file in sorted(checkpoint.rglob("*")) if file.is_file()]:
        content = file.read_bytes()
        file.unlink()
        with pytest.raises(CheckpointError, match=f"{file} is missing"):
            check_checkpoint(checkpoint)
        file.write_bytes(content)


def test_a_lost_description_neither_begins_anew_nor_is_written_over(tmp_path: Path) -> None:
    lost = write(tmp_path, 6)
    (lost / "checkpoint.json").unlink()
    with pytest.raises(CheckpointError, match=r"(?s)finds no checkpoint .*step_6: .*checkpoint.json is missing"):
        find_start("auto", tmp_path)
    with pytest.raises(CheckpointError, match="holds step_6 of another run"):
        find_start("never", tmp_path)
    write(tmp_path, 5)
    start = find_start("auto", tmp_path)
    assert start.step == 5 and [folder.name for folder, _ in start.damaged] == ["step_6"]
    start.quarantine()
    assert (tmp_path / "step_6.damaged" / "model" / "merges.txt").is_file()


def test_the_first_format_is_read_and_a_later_one_refused(tmp_path: Path) -> None:
    checkpoint, lines = write(tmp_path, 6), []
    rewrite_about(checkpoint, json.loads((checkpoint / "checkpoint.json").read_text()))
    assert find_start("auto", tmp_path, say=lines.append).step == 6
    assert lines == ["step_6 is of format 1, without checksums: its sizes and headers were checked, not its values"]
    write(tmp_path, 4)
    values = {"format": 3, "step": 6}
    sums = {"crc32": crc32(json.dumps(values, sort_keys=True, separators=(",", ":")).encode())}
    (checkpoint / "checkpoint.json").write_text(json.dumps(values | sums))
    with pytest.raises(CheckpointError, match="has format 3, and this release of dhp reads formats up to 2: a later"):
        find_start("auto", tmp_path)  # the older one does not stand in for it


def test_what_cannot_be_read_now_is_not_set_aside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, 5)
    file = write(tmp_path, 6) / "text" / "rank_00001.json"

    def refuse(number: int) -> None:
        def read(one: Path) -> int:
            if one == file:
                raise OSError(number, os.strerror(number))
            return file_checksum(one)

        monkeypatch.setattr("dhp.checkpoint.folder.file_checksum", read)

    refuse(errno.ESTALE)
    with pytest.raises(CheckpointError, match=f"{file} cannot be read .Stale"):
        find_start("auto", tmp_path)
    refuse(errno.EIO)  # of a disk that has lost it
    assert find_start("auto", tmp_path).step == 5


def test_a_run_that_was_taken_over_removes_nothing_of_the_others(tmp_path: Path) -> None:
    with fenced(tmp_path):
        with Unfinished() as unfinished:
            folder = unfinished.add(open_checkpoint(tmp_path, 6))
            (tmp_path / ".attempt.json").write_text('{"id": "b", "host": "other", "pid": 1}')
        assert folder.is_dir()
    with fenced(tmp_path):
        with Unfinished() as unfinished:
            unfinished.add(folder)
        assert not folder.exists()


def test_a_rank_compares_what_it_reads_whole(tmp_path: Path) -> None:
    folder = write(tmp_path, 6) / "text"
    file = folder / "rank_00001.safetensors"
    file.write_bytes(flipped(file.read_bytes(), 1))
    with pytest.raises(CheckpointError, match=r"rank_00001.safetensors is damaged \(the values of weight are not"):
        ShardReader(folder).flat("weight", 3, 3)


@pytest.mark.parametrize("damage", [empty, cut, zeros])
def test_ranks_and_export_say_so_too(tmp_path: Path, capsys, damage: Callable[[Path], None]) -> None:
    run = tmp_path / "run"
    file = write(run / "checkpoints", 1) / "text" / "rank_00001.safetensors"
    damage(file)
    with pytest.raises(CheckpointError, match=f"{file} is damaged"):
        read_shards(file.parent)
    assert dhp(["export", str(run), str(tmp_path / "out")]) == 1
    told = capsys.readouterr().err
    assert told.startswith(f"CheckpointError: {file} is damaged") and len(told.splitlines()) == 1
    damage(file.with_suffix(".json"))
    with pytest.raises(CheckpointError, match=f"{file.with_suffix('.json')} is damaged"):
        ShardReader(file.parent)


def test_everything_is_on_the_disk_before_the_name_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    fsync, rename = os.fsync, Path.rename

    def synced(handle: int) -> None:
        events.append(os.readlink(f"/proc/self/fd/{handle}"))
        fsync(handle)

    def renamed(path: Path, target: Path) -> Path:
        events.append(f"rename {target}")
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(Path, "rename", renamed)
    final = write(tmp_path, 7)
    partial = final.with_name("step_7.partial")
    at = events.index(f"rename {final}")
    written = [str(partial / path.relative_to(final)) for path in [final, *final.rglob("*")]]
    assert set(written) <= set(events[:at]) and events[at + 1 :] == [str(tmp_path)]


def test_all_files_have_the_mode_of_any_other(tmp_path: Path) -> None:
    (tmp_path / "any").touch()
    modes = {file.stat().st_mode for file in write(tmp_path, 1).rglob("*") if file.is_file()}
    assert modes == {(tmp_path / "any").stat().st_mode}


def test_a_file_system_that_cannot_sync_directories_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_handle: int) -> None:
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(os, "fsync", refuse)
    check_checkpoint(write(tmp_path, 1))


def test_a_full_disk_is_said_with_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    for owner, name in ((os, "fsync"), (Path, "write_bytes")):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, full)
            with pytest.raises(CheckpointError, match=r"step_\d.*cannot be written \(No space left .* Make room"):
                write(tmp_path, 3)


def test_what_a_run_did_not_finish_is_removed_and_nothing_else(tmp_path: Path) -> None:
    others = open_checkpoint(tmp_path, 1)
    unfinished = Unfinished()
    with pytest.raises(ValueError), unfinished:
        done = unfinished.add(open_checkpoint(tmp_path, 2))
        finish_checkpoint(done, {"step": 2}, {})
        unfinished.discard(done)
        begun = unfinished.add(open_checkpoint(tmp_path, 3))
        (begun / "file").touch()
        raise ValueError
    assert not begun.exists() and others.exists() and (tmp_path / "step_2").exists()
    begun.mkdir()  # a rank that still wrote
    with unfinished:
        pass
    assert not begun.exists()
