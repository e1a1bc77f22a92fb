"""Python imports this as it starts where this folder is on PYTHONPATH: in each process of a run. Functions of a module,
named by the environment, take longer in processes of one kind. dhp itself knows nothing of it. Imports nothing of
dhp."""

import functools
import json
import os
import time

from experiments.on_import import wrap_on_import

VARIABLE = "DHP_SLOWED"


def process_name():
    """`text-1`, `data-0` of an actor, by its log; "" of others."""
    try:
        return os.path.basename(os.readlink("/proc/self/fd/1")).removesuffix(".log")
    except OSError:
        return ""


def slowed(function, plan):
    """The function, with so many seconds more, and so many times its own time more."""

    @functools.wraps(function)
    def wrapper(*arguments, **named):
        begun = time.perf_counter()
        found = function(*arguments, **named)
        if process_name().startswith(plan["processes"]):
            time.sleep(plan["seconds"] + plan["times"] * (time.perf_counter() - begun))
        return found

    return wrapper


if __name__ == "sitecustomize" and VARIABLE in os.environ:
    _plan = json.loads(os.environ[VARIABLE])
    wrap_on_import(_plan["module"], _plan["functions"], functools.partial(slowed, plan=_plan))
