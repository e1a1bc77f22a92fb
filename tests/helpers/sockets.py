"""Where processes listen, read from Linux's own tables."""

import os
from collections.abc import Iterable
from pathlib import Path

LISTEN = "0A"  # the state of a listening socket in /proc/net/tcp
# 127.0.0.1, ::1 and ::ffff:127.0.0.1 as the kernel writes them
LOOPBACK = {"0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F"}


def listening_addresses(pids: Iterable[int]) -> set[str]:
    """Addresses, as /proc/net/tcp writes them, on which any of the processes listens."""
    mine = {link for pid in pids for link in _open_files(pid)}
    rows = [line.split() for table in ("tcp", "tcp6") for line in _lines(table)]
    return {row[1].partition(":")[0] for row in rows if row[3] == LISTEN and f"socket:[{row[9]}]" in mine}


def processes_naming(text: str) -> list[int]:
    """Processes with `text` in their command line."""
    return [int(f.name) for f in Path("/proc").iterdir() if f.name.isdigit() and text in _command(f)]


def _command(folder: Path) -> str:
    try:
        return (folder / "cmdline").read_text(errors="replace")
    except OSError:  # it has ended
        return ""


def _open_files(pid: int) -> set[str]:
    try:
        return {os.readlink(fd) for fd in Path(f"/proc/{pid}/fd").iterdir()}
    except OSError:
        return set()


def _lines(table: str) -> list[str]:
    path = Path(f"/proc/net/{table}")
    return path.read_text().splitlines()[1:] if path.exists() else []
