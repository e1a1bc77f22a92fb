"""Files that a process keeps for others on its node."""

from __future__ import annotations

import os
from pathlib import Path

from dhp.cluster.hangs.vitals import open_kept, own_post


def test_a_file_lies_beside_the_logs_or_in_memory_of_the_process(tmp_path: Path) -> None:
    file, path = open_kept(str(tmp_path), "text-0.stacks", append=True)
    os.write(file, b"first ")
    os.write(file, b"second")
    assert path == str(tmp_path / "text-0.stacks") and Path(path).read_text() == "first second"
    for folder in (None, str(tmp_path / "missing")):
        file, path = open_kept(folder, "text-0.stacks")
        os.write(file, b"here")
        assert path == f"/proc/{os.getpid()}/fd/{file}" and Path(path).read_text() == "here"
        os.close(file)


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "text-0.stacks").symlink_to(tmp_path / "elsewhere")
    file, path = open_kept(str(tmp_path), "text-0.stacks")
    assert path.startswith("/proc/") and not (tmp_path / "elsewhere").exists()
    os.close(file)


def test_the_process_is_found_again() -> None:
    process = own_post("text-0", "here", "/missing").process()
    assert process is not None and process.pid == os.getpid()
