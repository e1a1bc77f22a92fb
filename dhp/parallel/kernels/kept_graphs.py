"""Compiled graphs on disk, which later runs on the machine need not compile again."""

import os
import stat
from hashlib import sha256
from pathlib import Path

import torch

FOLDER = "compiled"
SETTING = "TORCHINDUCTOR_CACHE_DIR"  # torch's own


def keep_graphs(folder: Path, device: torch.device) -> str | None:
    """Have this process keep what it compiles below `folder`, and take what is kept there; a sentence where not.

    Each user has a folder for each version of torch on each kind of device and CPU; torch itself looks, graph by graph,
    whether code, versions and device agree, and compiles again what it cannot read. What is kept is run, so a folder
    that others may write to, or exchange, is not used. The user's own setting stays."""
    if os.environ.get(SETTING):
        return None
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    kind = "-".join([torch.__version__, *name.split(), _cpu(), str(os.getuid())])
    kept = folder.resolve() / FOLDER / kind
    try:
        kept.mkdir(mode=0o700, parents=True, exist_ok=True)
        _require_ours(kept)
    except OSError as error:
        return f"compiled graphs are not kept in {kept}: {error}. They are compiled anew in each run"
    os.environ[SETTING] = str(kept)
    return None


def _require_ours(folder: Path) -> None:
    """Raise OSError where another user may change what is in the folder, or which one it is."""
    about = folder.lstat()
    if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.getuid() or about.st_mode & 0o022:
        raise OSError("others may write there, and what it holds would be run; remove it, or make it yours alone")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise OSError("it cannot be written")
    for above in folder.parents:
        about = above.stat()
        group_writes = about.st_mode & 0o020 and about.st_gid != os.getgid()
        exchanged = (about.st_mode & 0o002 or group_writes) and not about.st_mode & stat.S_ISVTX
        if exchanged or about.st_uid not in (0, os.getuid()):
            raise OSError(f"others may exchange it, since they may write to {above}; name a folder of yours")


def _cpu() -> str:
    """Of this machine's CPU, since graphs are compiled for what it has: eight digits."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    kinds = sorted({line for line in lines if line.startswith(("model name", "flags", "Features", "CPU part"))})
    return sha256("\n".join(kinds).encode()).hexdigest()[:8]
