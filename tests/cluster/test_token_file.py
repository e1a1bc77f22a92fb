"""A cluster's token that other users of the host can read lets them run commands as its owner."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from dhp.cluster.ray_session import TOKEN, check_token_file
from dhp.core.errors import ConfigError


@pytest.mark.parametrize(
    ("file_mode", "folder_mode", "refused"),
    [(0o644, 0o755, True), (0o644, 0o700, False), (0o600, 0o755, False), (0o640, 0o755, False)],
)
def test_a_token_that_others_can_read_is_refused(
    file_mode: int, folder_mode: int, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (TOKEN, "RAY_AUTH_TOKEN_PATH", "RAY_AUTH_MODE"):
        monkeypatch.delenv(name, raising=False)
    with TemporaryDirectory(dir="/tmp") as home:  # below pytest's own folder nobody else could enter
        monkeypatch.setenv("HOME", home)
        file = Path(home) / ".ray" / "auth_token"
        file.parent.mkdir()
        file.write_text("0" * 64)
        file.chmod(file_mode)
        Path(home).chmod(folder_mode)
        if refused:
            with pytest.raises(ConfigError, match="chmod 600"):
                check_token_file()
            monkeypatch.setenv(TOKEN, "1" * 64)  # which Ray takes before the file
        check_token_file()
