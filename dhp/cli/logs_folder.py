"""A temporary folder for the logs of a command's actors."""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dhp.base.errors import ClusterError, DhpError, PartFailed


@contextmanager
def logs_folder(prefix: str) -> Iterator[Path]:
    """A new folder, which is removed at the end, also of what was refused or interrupted. It stays, named on stderr,
    where an actor failed, or where any other exception than dhp's own was raised: its logs may say why."""
    folder = Path(tempfile.mkdtemp(prefix=prefix))
    kept = False
    try:
        yield folder
    except Exception as error:
        kept = isinstance(error, (PartFailed, ClusterError)) or not isinstance(error, DhpError)
        raise
    finally:
        if kept and any(folder.rglob("*.log")):
            print(f"the actors' logs stay in {folder}", file=sys.stderr, flush=True)
        else:
            shutil.rmtree(folder, ignore_errors=True)
