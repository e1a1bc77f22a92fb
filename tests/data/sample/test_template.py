"""A chat template from a file, and what a file that is none is answered with."""

from __future__ import annotations

from pathlib import Path

import pytest

from dhp.core.errors import ConfigError
from dhp.data.sample.chat import MAX_BYTES, read_template


def test_a_template_is_its_files_text(tmp_path: Path) -> None:
    file = tmp_path / "own.jinja"
    text = "{% for m in messages %}{% generation %}é{{ m }}{% endgeneration %}{% endfor %}"
    file.write_text(text, encoding="utf-8")
    assert read_template(str(file)) == text and read_template(None) is None


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "cannot be read: No such file or directory. Give a file with a Jinja template"),
        (b"", "is empty. Give a file with a Jinja template, or null"),
        (b" \n", "is empty"),
        (b"ab\xff", r"is not UTF-8 text \(byte 2\)"),
        (b"\n{% for x in %}", "is no Jinja template: line 2: "),
        (b"{{ open", "is no Jinja template: line 1: "),
        (b"x" * (MAX_BYTES + 1), "has 1048577 bytes, more than any template"),
    ],
)
def test_what_is_no_template_is_told(tmp_path: Path, content: bytes | None, reason: str) -> None:
    file = tmp_path / "own.jinja"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError, match=rf"^data\.chat_template={file} {reason}"):
        read_template(str(file))


def test_a_folder_is_no_template(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        read_template(str(tmp_path))
