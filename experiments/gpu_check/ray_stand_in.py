"""A name in Ray's place, where it is not installed: what a rank's process imports and, on one host, never calls.

To be imported before dhp's worker.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from types import ModuleType

ERRORS = ("GetTimeoutError", "RayActorError", "RayError", "RayTaskError")


def _provide() -> None:
    ray, errors = ModuleType("ray"), ModuleType("ray.exceptions")
    for name in ERRORS:
        setattr(errors, name, type(name, (Exception,), {}))
    ray.exceptions, ray.ObjectRef = errors, type("ObjectRef", (), {})
    sys.modules |= {"ray": ray, "ray.exceptions": errors}


if find_spec("ray") is None:
    _provide()
