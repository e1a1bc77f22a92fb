"""The product's fork server, with the imports of tests, for drivers too: a file MARK-PID beside its socket stands for
each fork whose environment has a mark (tests/helpers/runs.py), as /proc shows the server's environment for all."""

import sys
from pathlib import Path

from dhp.cluster.forks.server import Server, load
from tests.helpers.marks import MARK

READY = "ready"  # the file beside the socket that says that the imports are done


class MarkingServer(Server):
    """Keeps the files."""

    def __init__(self, address: Path) -> None:
        super().__init__(address)
        self._folder, self._files = address.parent, dict[int, Path]()

    def begun(self, pid: int, environment: dict[str, str]) -> None:
        if MARK in environment:
            self._files[pid] = self._folder / f"{environment[MARK]}-{pid}"
            self._files[pid].touch()

    def ended(self, pid: int) -> None:
        self._files.pop(pid, self._folder / "none").unlink(missing_ok=True)


if __name__ == "__main__":
    server = MarkingServer(Path(sys.argv[1]))
    load(["tests.helpers.warm"])
    (server._folder / READY).touch()
    server.serve()
