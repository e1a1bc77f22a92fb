"""What strangers wrote does not steer the terminal that shows it."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from dhp.__main__ import main
from dhp.config.command_line import hydra_entry
from dhp.core.errors import CheckpointError, DataError, UnreadableVideo
from dhp.core.text import harmless, one_line
from dhp.data.media.images import open_image
from dhp.data.media.sources import MediaResolver

TITLE = "a\x1b]0;PWNED\x07\x1b[2J\nConfigError: all is well"


def test_control_characters_are_spelt_out() -> None:
    assert harmless("a\x1b\u202e\n\t\ud800é") == "a\\x1b\\u202e\n\t\\ud800é"
    assert one_line("a\u2028b\nc\r") == "a\\u2028b\\nc\\r"
    assert one_line(one_line(TITLE)) == one_line(TITLE)


@pytest.mark.parametrize("name", [f"{TITLE}.png", f"https://x/{TITLE}", f"../{TITLE}", f"ftp://x/{TITLE}"])
def test_names_in_errors_of_data(name: str, tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        open_image(MediaResolver(tmp_path).find(name, "image"))
    told = str(caught.value)
    assert "PWNED" in told and not {"\x1b", "\x07", "\n"} & set(told)
    again = pickle.loads(pickle.dumps(caught.value))  # as it comes from another process
    assert (type(again), str(again)) == (DataError, told)


def test_an_error_with_a_file_keeps_it() -> None:
    again = pickle.loads(pickle.dumps(UnreadableVideo(TITLE, Path("a"))))
    assert again.file == Path("a") and str(again) == one_line(TITLE)


def test_what_ends_a_command_is_shown_harmless(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> int:
        raise CheckpointError(TITLE)  # names in a checkpoint are a stranger's, too

    monkeypatch.setattr("dhp.cli.export.main", fail)
    monkeypatch.setenv("HYDRA_FULL_ERROR", "")
    assert main(["export"]) == 1
    with pytest.raises(SystemExit):
        hydra_entry(fail, ["--config-name=tiny"])
    told = capsys.readouterr().err
    assert told.count("PWNED") == 2 and not {"\x1b", "\x07"} & set(told)
