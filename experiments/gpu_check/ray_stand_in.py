"""A name in Ray's place, where it is not installed: what a rank's process imports, and the one function that it calls.

To be imported before dhp's worker.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from types import ModuleType

LOOPBACK = "127.0.0.1"
ERRORS = ("GetTimeoutError", "RayActorError", "RayError", "RayTaskError")


def _provide() -> None:
    ray, errors = ModuleType("ray"), ModuleType("ray.exceptions")
    for name in ERRORS:
        setattr(errors, name, type(name, (Exception,), {}))
    ray.exceptions, ray.ObjectRef = errors, type("ObjectRef", (), {})
    ray.util = ModuleType("ray.util")
    ray.util.get_node_ip_address = lambda: LOOPBACK  # a rank on a GPU names its node in errors
    sys.modules |= {"ray": ray, "ray.exceptions": errors, "ray.util": ray.util}


if find_spec("ray") is None:
    _provide()
