"""Files of lengths: columns by their names, in any order, and what is said of those that cannot be read."""

from __future__ import annotations

from pathlib import Path

import pytest

from dhp.core.errors import ConfigError
from dhp.trainer.forecast.samples import read_table


def test_columns_are_found_by_name(tmp_path: Path) -> None:
    file = tmp_path / "lengths.csv"
    file.write_text('name,text,vision\n"a picture",700,512\nnone,"30",0\n')
    rows = read_table(file).rows
    assert rows["text"].tolist() == [700, 30] and rows["vision"].tolist() == [512, 0]
    file.write_text("text\n5\n")
    assert read_table(file).rows.tolist() == [(0, 5)]  # vision is 0 where it is not known


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ("", "has no lines: a column `text`"),
        ("vision\n1\n", "has vision: a column `text`"),
        ("text,vision\n", "has no samples"),
        ("text,vision\n1,x\n", "a column of text, vision has what is no number .*'x'"),
        ("text\nnan\n", "has what is no number"),
        ("text,vision\n5\n", "has what is no number"),
    ],
)
def test_what_is_no_table_is_refused(written: str, said: str, tmp_path: Path) -> None:
    file = tmp_path / "lengths.csv"
    file.write_text(written)
    with pytest.raises(ConfigError, match=f"lengths={file}.*{said}"):
        read_table(file)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none.csv cannot be read"):
        read_table(tmp_path / "none.csv")
