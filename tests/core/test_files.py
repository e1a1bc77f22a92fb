"""Files, fingerprints, tables and words."""

import sys
from pathlib import Path

import pytest

from dhp.core import files as module
from dhp.core.files import fingerprint, new_folder, remove, replaced, require_writable, write_whole
from dhp.core.text import aligned, did_you_mean, nearest, nearest_key, shell_command


def test_a_folder_has_its_name_when_it_is_complete(tmp_path: Path) -> None:
    wanted = tmp_path / "above" / "made"
    with new_folder(wanted) as partial:
        partial.mkdir()
        (partial / "file").write_text("own")
        assert not wanted.exists()
    assert (wanted / "file").read_text() == "own" and list(wanted.parent.iterdir()) == [wanted]


def test_the_folder_of_a_faster_maker_stays(tmp_path: Path) -> None:
    wanted = tmp_path / "made"
    with new_folder(wanted) as partial:
        partial.mkdir()
        wanted.mkdir()
        (wanted / "file").write_text("other")
    assert (wanted / "file").read_text() == "other" and list(tmp_path.iterdir()) == [wanted]


def test_what_cannot_get_its_name_is_told_and_removed(tmp_path: Path) -> None:
    with pytest.raises(OSError), new_folder(tmp_path / "made"):
        pass  # nothing was made, so nothing can be renamed
    assert list(tmp_path.iterdir()) == []


def test_a_file_is_replaced_when_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "above" / "file"
    write_whole(path, "one ä")
    assert path.read_text(encoding="utf-8") == "one ä"
    with pytest.raises(RuntimeError), replaced(path) as unfinished:
        unfinished.write_text("half")
        raise RuntimeError
    assert path.read_text(encoding="utf-8") == "one ä"
    write_whole(path, b"two")
    assert path.read_bytes() == b"two" and list(path.parent.iterdir()) == [path]


def test_a_folder_that_cannot_be_written_is_found(tmp_path: Path) -> None:
    require_writable(tmp_path / "new")
    assert list((tmp_path / "new").iterdir()) == []
    (tmp_path / "file").touch()
    with pytest.raises(OSError):
        require_writable(tmp_path / "file" / "below")
    with pytest.raises(OSError), replaced(tmp_path / "file" / "below"):
        pass


def test_folders_files_and_links(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    (kept / "deep").mkdir(parents=True)
    (kept / "file").touch()
    for name, target in (("to a folder", kept), ("to a file", kept / "file"), ("to nothing", tmp_path / "gone")):
        link = tmp_path / name
        link.symlink_to(target)
        remove(link)
        assert not link.is_symlink()
    assert (kept / "deep").is_dir() and (kept / "file").is_file()
    remove(kept / "file")
    remove(kept)
    remove(kept)  # nothing there is no error
    assert list(tmp_path.iterdir()) == []


def write(file: Path, content: bytes) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(content)
    return file


def test_contents_and_names_count_and_places_do_not(tmp_path: Path) -> None:
    one = fingerprint([write(tmp_path / "a" / "x", b"one")])
    assert one == fingerprint([write(tmp_path / "b" / "x", b"one")])
    others = [[write(tmp_path / "c" / "x", b"two")], [write(tmp_path / "c" / "y", b"one")], []]
    assert len({one, *map(fingerprint, others)}) == 4


@pytest.mark.parametrize("at", [0, 500, 999])
def test_a_large_file_is_sampled_from_its_first_byte_to_its_last(
    at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("_WHOLE", 100), ("_BLOCKS", 3), ("_BLOCK", 20)):
        monkeypatch.setattr(module, name, value)
    content = bytearray(1000)
    before = fingerprint([write(tmp_path / "x", bytes(content))])
    content[at] = 1
    assert fingerprint([write(tmp_path / "x", bytes(content))]) != before


def test_of_many_files_all_names_and_sizes_and_some_contents_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_FILES", 3)
    files = [write(tmp_path / str(number), b"0") for number in range(7)]
    before = fingerprint(files)
    for number in (0, 3, 6):
        write(files[number], b"1")
        assert fingerprint(files) != before
        write(files[number], b"0")
    write(files[1], b"00")
    assert fingerprint(files) != before


def test_columns_are_as_wide_as_their_widest_cell() -> None:
    rows = [("stage", "kind", "bytes"), ("vision", "", "7"), ("text", "causal", "12,345")]
    assert aligned(rows, left=2) == ["stage   kind     bytes", "vision               7", "text    causal  12,345"]
    assert aligned(rows, left=3) == ["stage   kind    bytes", "vision          7", "text    causal  12,345"]


def test_a_row_with_a_cell_too_many_is_a_mistake() -> None:
    with pytest.raises(ValueError):
        aligned([("a", "b"), ("a", "b", "c")], left=1)


KEYS = ["name", "vision", "vision.num_actors", "vision.dtype", "text", "text.num_actors", "text.dtype", "training.seed"]


@pytest.mark.parametrize(
    ("typed", "meant"), [("shpes", "shapes"), ("SHAPES", "shapes"), ("digit", "digits"), ("zebra", None)]
)
def test_nearest(typed, meant):
    assert nearest(typed, ["digits", "shapes"]) == meant
    assert nearest(typed, []) is None


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("vision.num_actor", ["vision.num_actors"]),
        ("visoin.num_actors", ["vision.num_actors"]),
        ("num_actors", ["vision.num_actors", "text.num_actors"]),
        ("num_actor", ["vision.num_actors", "text.num_actors"]),
        ("cluster.dtype", ["vision.dtype", "text.dtype"]),
        ("vison", ["vision"]),
        ("optimizer.momentum", []),
        ("training.deepspeed", []),
        ("actors", ["vision.num_actors", "text.num_actors"]),
    ],
)
def test_nearest_key(typed, meant):
    assert nearest_key(typed, KEYS) == meant


def test_did_you_mean():
    assert did_you_mean(["a", "b"]) == "; did you mean a or b?"
    assert did_you_mean([None]) == did_you_mean([]) == ""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An environment with a console command, which is not on the PATH."""
    for name in ("python", "dhp"):
        (tmp_path / "bin" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "bin" / name).write_text("#!/bin/sh\n")
        (tmp_path / "bin" / name).chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bin" / "python"))
    monkeypatch.setattr(sys, "argv", ["somewhere/dhp/__main__.py"])
    monkeypatch.setenv("PATH", str(tmp_path / "other"))
    return tmp_path / "bin" / "dhp"


def test_without_a_console_command_modules_are_named(script: Path) -> None:
    assert shell_command() == ["python", "-m", "dhp"]
    assert shell_command("export", "a", "b") == ["python", "-m", "dhp", "export", "a", "b"]
    assert shell_command("train", "my.yaml") == ["python", "-m", "dhp.train_ray", "my.yaml"]


def test_that_of_this_python_is_named_where_a_shell_finds_it(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(script.parent))
    assert shell_command("train", "my.yaml") == ["dhp", "train", "my.yaml"]
    assert shell_command("export", "a") == ["dhp", "export", "a"]


def test_that_of_another_python_is_not(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(script.parent))
    monkeypatch.setattr(sys, "executable", "/usr/elsewhere/bin/python")
    assert shell_command("export") == ["python", "-m", "dhp", "export"]


def test_what_was_called_by_its_path_is_named_by_it(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [str(script), "train", "my.yaml"])
    assert shell_command("train", "my.yaml") == [str(script), "train", "my.yaml"]
