"""Which tests go to the same of several workers (`pytest -n 2 --dist loadgroup`), and which go first.

Tests that share what is made once a file, or one Ray, share a worker, or it would be made in each. All others go
wherever there is room. xdist's own groups, which it writes behind a test's name, are lost under pytest 9.2: it asks
for names elsewhere."""

from functools import cache
from pathlib import Path
from typing import Any

from xdist.scheduler.loadscope import LoadScopeScheduling

ROOT = Path(__file__).parents[2]
_ONE_RAY = ("tests/cluster/", "tests/nodes/")
_OF_A_FILE = ('scope="module"', "on_ranks", "long_run")  # words of files whose tests share something costly
# What a process counts of a model it keeps.
_KEEPS_COUNTS = ("tests/cli/test_plan.py", "tests/plan/search/test_layouts.py", "tests/trainer/test_dry_run.py")
_SHARED = ("long_run", "first_run")
_FIRST = (
    "tests/trainer/",
    "tests/nodes/",
    "tests/test_train_ray.py",
    "tests/cluster/",
    "tests/cli/",
    "tests/fake_cuda/",
)
_NEXT = (
    *("tests/checkpoint/", "tests/experiments/", "tests/plan/", "tests/engine/", "tests/models/", "tests/parallel/"),
)


class Together(LoadScopeScheduling):
    """Deals groups out in the order of the tests."""

    def __init__(self, config: Any, log: Any) -> None:
        config.option.loadscopereorder = False  # by their numbers of tests, which say nothing of how long they take
        super().__init__(config, log)
        self._root = config.rootpath

    def _split_scope(self, nodeid: str) -> str:
        return group_of(nodeid, self._root)


def group_of(nodeid: str, root: Path = ROOT) -> str:
    """What a test's group is called: a folder, a file, what several files share, or its own name."""
    file = nodeid.partition("::")[0]
    folder = next((folder for folder in _ONE_RAY if file.startswith(folder)), None)
    return folder or _group_of_file(root / file, file) or nodeid


@cache
def _group_of_file(path: Path, file: str) -> str | None:
    text = path.read_text()
    if any(name in text for name in _SHARED):
        return _SHARED[0]
    return file if file in _KEEPS_COUNTS or any(word in text for word in _OF_A_FILE) else None


def place_of(nodeid: str) -> int:
    """A sort key: what takes long begins first, so that no worker ends long after the others."""
    return 0 if nodeid.startswith(_FIRST) else 1 if nodeid.startswith(_NEXT) else 2
