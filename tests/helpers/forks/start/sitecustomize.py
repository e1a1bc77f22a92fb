"""Python imports this in the processes of a test's run: drivers, and Ray workers, become forks of the tests' server."""

import importlib
import os
import sys

SERVER = "DHP_FORK_SERVER"  # as `dhp.cluster.forks.fork_client` has it, which is imported only where it is needed
MODULES = "DHP_FORK_MODULES"  # modules that are forks when Python is started with -m, beside Ray's workers


def _has_a_fork(words: list[str]) -> bool:
    named = words[1:2] == ["-m"] and words[2] in os.environ.get(MODULES, "").split()
    return named or any(word.endswith("/default_worker.py") for word in words[1:3])


def _hand_over() -> None:
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path.append(os.path.join(here, *[os.pardir] * 4, "dhp", "cluster", "forks"))
    fork_client = importlib.import_module("fork_client")  # by itself: the package would import all of dhp
    sys.path.pop()
    fork_client.hand_over(os.environ[SERVER], sys.orig_argv)


def _import_the_next() -> None:
    """The environment's own module of this name, which this one hides."""
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [folder for folder in sys.path if os.path.abspath(folder) != here]
    own = sys.modules.pop("sitecustomize", None)
    try:
        importlib.import_module("sitecustomize")
    except ImportError:
        if own is not None:
            sys.modules["sitecustomize"] = own


if __name__ == "sitecustomize":  # not where it is imported for its names
    if SERVER in os.environ and _has_a_fork(sys.orig_argv):
        _hand_over()
    _import_the_next()
