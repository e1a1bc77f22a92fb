"""The file with the token of a cluster that is joined: who has it may run commands on that cluster."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from dhp.base.errors import ConfigError
from dhp.cluster.own_ray import TOKEN

PATH = "RAY_AUTH_TOKEN_PATH"


def check_token_file() -> None:
    """Raise ConfigError where Ray will read its token from a file that other users of this host can read too.

    Ray itself writes it with mode 0644, so what counts is whether they can enter every folder on the way as well.
    """
    file = Path(os.environ.get(PATH) or Path.home() / ".ray" / "auth_token")
    if TOKEN in os.environ or not file.is_file() or os.environ.get("RAY_AUTH_MODE", "").lower() == "disabled":
        return
    real = file.resolve()
    if real.stat().st_mode & stat.S_IROTH and all(folder.stat().st_mode & stat.S_IXOTH for folder in real.parents):
        raise ConfigError(
            f"{file} is the cluster's token, and other users of this host can read it and run commands on the cluster "
            f"as you. Run `chmod 600 {file}`, and make a new token if others have accounts here"
        )
